"""`chairlift plan`: what fits, and how fast it will be, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from chairlift.cli.load_options import LOAD, LoadSeed, OutputLen, PromptLen
from chairlift.cli.options import add_options
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.lab.planning.planner import Load, PlannedModel
    from chairlift.lab.sim.devices import Device
    from chairlift.loading.resolve import ModelFiles
    from chairlift.models.config import ModelConfig

CPU, CUDA = "cpu", "cuda"

PLAN_OPTIONS = (
    "dtype",
    "kernels",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "batching",
    "static_batch_size",
    "kv",
    "kv_arena",
    "block_size",
    "kv_cache_memory",
    "num_kv_blocks",
)
"""The options of an engine that its plan depends on."""


@add_options(PLAN_OPTIONS)
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A folder with config.json, a .gguf file, a name on the hub, or a shape (opt-13b, llama-3-8b, ...); "
            "the default is SmolLM2-135M-Instruct."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="For weights, activations, K and V, such as 24GiB; if not given, what serve would take."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, A100-40GB, A100-80GB, H100-SXM, H200, or a file of simulate --calibrate.")
    ] = CPU,
    prompt_len: PromptLen = None,
    output_len: OutputLen = None,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            help="What requests declare at most, a number or written the same way; their true lengths if not given.",
            rich_help_panel=LOAD,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(help="Poisson arrivals a second; inf or not given: all at once.", rich_help_panel=LOAD),
    ] = None,
    workload_seed: LoadSeed = 0,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic, line by line.")] = False,
    only_json: Annotated[bool, typer.Option("--json", help="Print the JSON line alone.")] = False,
    *,
    config: EngineConfig,
) -> None:
    """Weights, KV blocks, requests at once under every policy, expected speed, and the command to serve with."""
    from chairlift.lab.planning.planner import make_plan
    from chairlift.lab.planning.show import print_plan

    kind, hardware = _device(device)
    config = replace(config, device=kind)
    load = _load(prompt_len, output_len, max_tokens, request_rate, workload_seed)
    memory_bytes, free_share = _memory(memory, config, hardware)
    planned = make_plan(
        _model(config), config, load, memory_bytes=memory_bytes, free_share=free_share, hardware=hardware
    )
    print_plan(planned, explained=explain, only_json=only_json)


def _device(name: str) -> tuple[str, Device | None]:
    """Where the engine runs, and what is known of how fast that is. A file describes a CPU, as --calibrate writes it.

    Raises:
        ConfigError: it is none of those.
    """
    from chairlift.lab.sim.devices import DEVICES, find_device

    if name in (CPU, CUDA):
        return name, None
    return CUDA if name in DEVICES else CPU, find_device(name)


def _memory(text: str | None, config: EngineConfig, hardware: Device | None) -> tuple[int | None, float]:
    """Bytes for all, and the share of what weights and activations leave that K and V get. Memory that was given is the
    engine's own; of what a machine has, K and V get the share that `chairlift serve` takes.

    Raises:
        ConfigError: it is not an amount, or it is not known how much there is.
    """
    from chairlift.worker.kv_cache_plan import FREE_MEMORY_SHARE
    from chairlift.worker.memory import available_host_memory, parse_memory

    if text is not None:
        return parse_memory(text), 1.0
    if config.num_kv_blocks is not None or config.kv_cache_memory is not None:
        return None, 1.0
    if hardware is not None:
        return hardware.memory_bytes, FREE_MEMORY_SHARE[config.device]
    if config.device == CPU:
        return available_host_memory(), FREE_MEMORY_SHARE[CPU]
    raise ConfigError(
        "device=cuda says not how much memory there is: give --memory, --kv-cache-memory or --num-kv-blocks, or name "
        "the device (A100-40GB, ...)"
    )


def _model(config: EngineConfig) -> PlannedModel:
    """A shape, or a model whose configuration is read and whose weights are not.

    Raises:
        ModelLoadError: there is no such model.
    """
    from chairlift.lab.planning.planner import PlannedModel
    from chairlift.lab.sim.published_models import MODEL_SHAPES
    from chairlift.loading.resolve import load_config, matrix_formats, resolve_model

    name = config.model
    if name in MODEL_SHAPES:
        argument, model_config = f"FOLDER-OF-{name}", MODEL_SHAPES[name].config
        note = f"{name} is a shape: put the folder of the model, or its name on the hub, in the place of {argument}."
        return PlannedModel(name, argument, model_config, matrix_formats(None, model_config), note)
    files = resolve_model(name)
    model_config = load_config(files)
    formats = matrix_formats(files, model_config)
    return PlannedModel(files.name, name or files.name, model_config, formats, _file_note(files, model_config, config))


def _file_note(files: ModelFiles, model_config: ModelConfig, config: EngineConfig) -> str | None:
    """That a quantized file grows in memory, unless kernels take it as it is."""
    from chairlift.kernels.choice import choose_kernels
    from chairlift.worker.memory import format_memory

    if files.kind != "gguf" or choose_kernels(config, model_config.dtype).kernels == "native":
        return None
    return (
        f"The file has {format_memory(files.path.stat().st_size)}; its tensors are brought to the compute type "
        f"when they are loaded, so memory holds what is planned here."
    )


def _load(
    prompt_len: str | None, output_len: str | None, max_tokens: str | None, request_rate: float | None, seed: int
) -> Load:
    from chairlift.lab.bench.load import DEFAULT_OUTPUT_LEN, DEFAULT_PROMPT_LEN
    from chairlift.lab.planning.planner import Load
    from chairlift.lab.workload.lengths import parse_lengths

    if max_tokens is not None and max_tokens.isdecimal():
        max_tokens = f"fixed:{max_tokens}"
    return Load(
        prompt_len=parse_lengths(prompt_len or DEFAULT_PROMPT_LEN),
        output_len=parse_lengths(output_len or DEFAULT_OUTPUT_LEN),
        max_tokens=None if max_tokens is None else parse_lengths(max_tokens),
        request_rate=request_rate,
        seed=seed,
    )
