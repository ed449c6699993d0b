"""`chairlift plan`: plans memory and speed of an engine before its model is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from cyclopts import Parameter

from chairlift.cli.console import Json
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.lab.bench.workload_options import WorkloadOptions
from chairlift.option_sources import with_options
from chairlift.options import Selection, check_options, option
from chairlift.system.memory_amounts import parse_memory

if TYPE_CHECKING:
    from chairlift.lab.planning.planned_workload import PlannedWorkload
    from chairlift.lab.planning.planner import PlannedModel
    from chairlift.lab.sim.devices import Device
    from chairlift.loading.model_source import ModelSource
    from chairlift.models.declaration.model_config import ModelConfig

CPU, CUDA = "cpu", "cuda"

ENGINE_OPTIONS = (
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
    "disable_hybrid_kv_cache_manager",
    "speculative_config",
    "max_loras",
    "max_lora_rank",
    "block_size",
    "kv_cache_memory_bytes",
    "num_kv_blocks",
)
"""The options of the engine that affect a plan."""


WORKLOAD_OPTIONS = ("input_len", "output_len", "request_rate", "seed")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What is planned."""

    OPTION_GROUP: ClassVar = "Plan"

    max_tokens: str | None = option(
        None, "max_tokens of the requests, a number or a distribution. Default: their true output lengths."
    )
    memory: int | None = option(
        None,
        "Memory for weights, activations, K and V, such as 24GiB. Default: as in chairlift serve.",
        parse=parse_memory,
    )
    device: str = option(CPU, "cpu, cuda, A100-40GB, A100-80GB, H100-SXM, H200, or a file of simulate --calibrate.")
    replicas: int = option(1, "Number of replicas on one machine, which share its memory and the requests.", minimum=1)

    def __post_init__(self) -> None:
        check_options(self)


@with_options
def plan(
    model: Annotated[
        str | None,
        Parameter(
            help="Folder with config.json, .gguf file, name on the hub, or shape (opt-13b, llama-3-8b, ...). "
            "Default: SmolLM2-135M-Instruct."
        ),
    ] = None,
    /,
    *,
    as_json: Json = False,
    options: PlanOptions,
    load: Annotated[WorkloadOptions, Selection(only=WORKLOAD_OPTIONS)],
    config: Annotated[EngineConfig, Selection(only=ENGINE_OPTIONS)],
) -> None:
    """Plan an engine for a model and a workload on a device."""
    from chairlift.lab.planning.plan_report import print_plan
    from chairlift.lab.planning.planner import make_plan

    kind, hardware = _device(options.device)
    config = replace(config, model=model, device=kind)
    memory_bytes, free_share = _memory(options.memory, config, hardware)
    planned = make_plan(
        _model(config),
        config,
        _workload(options, load),
        memory_bytes=memory_bytes,
        free_share=free_share,
        hardware=hardware,
        replicas=options.replicas,
    )
    print_plan(planned, as_json=as_json)


def _device(name: str) -> tuple[str, Device | None]:
    """The device of the engine, and its hardware if it is known. A calibration file describes a CPU.

    Raises:
        ConfigError: the name is neither a device nor a file.
    """
    from chairlift.lab.sim.devices import DEVICES, find_device

    if name in (CPU, CUDA):
        return name, None
    return CUDA if name in DEVICES else CPU, find_device(name)


def _memory(given: int | None, config: EngineConfig, hardware: Device | None) -> tuple[int | None, float]:
    """The memory in bytes, and the share of the memory left by weights and activations that K and V get.

    The share is 1 if the memory is given, else that of `chairlift serve`.

    Raises:
        ConfigError: the memory of the device is unknown.
    """
    from chairlift.engine.startup.pool_plan import FREE_MEMORY_SHARE
    from chairlift.worker.memory import available_memory

    if given is not None:
        return given, 1.0
    if config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return None, 1.0
    if hardware is not None:
        return hardware.memory_bytes, FREE_MEMORY_SHARE[config.device]
    if config.device == CPU:
        return available_memory(), FREE_MEMORY_SHARE[CPU]
    raise ConfigError(
        "device=cuda has no known size of memory: give --memory, --kv-cache-memory-bytes or --num-kv-blocks, or "
        "name the device (A100-40GB, ...)"
    )


def _model(config: EngineConfig) -> PlannedModel:
    """Find the shape, or read the configuration of the model without its weights.

    Raises:
        ModelLoadError: the name is neither a shape nor a model.
    """
    from chairlift.lab.planning.planner import PlannedModel
    from chairlift.lab.sim.published_models import MODEL_SHAPES
    from chairlift.loading.model_source import choose_predictor, declared_formats
    from chairlift.loading.resolve import resolve_model

    name = config.model
    if name in MODEL_SHAPES:
        argument = f"FOLDER-OF-{name}"
        model_config = choose_predictor(MODEL_SHAPES[name].config, name, config.needs_predictor)
        note = (
            f"{name} is a shape without weights: replace {argument} by the folder of the model or its name on the hub."
        )
        return PlannedModel(name, argument, model_config, declared_formats(model_config), note)
    source = resolve_model(name)
    model_config = source.decoder_config(needs_predictor=config.needs_predictor)
    formats = source.formats(model_config)
    note = _file_note(source, model_config, config)
    return PlannedModel(source.name, name or source.name, model_config, formats, note)


def _file_note(source: ModelSource, model_config: ModelConfig, config: EngineConfig) -> str | None:
    """A note if the kernels do not read the quantized formats of the file."""
    from chairlift.kernels.choice import choose_kernels
    from chairlift.system.memory_amounts import format_memory

    if not source.is_quantized(model_config) or choose_kernels(config, model_config.dtype).kernels == "native":
        return None
    file_bytes = sum(file.stat().st_size for file in source.weight_files())
    return (
        f"The file has {format_memory(file_bytes)}. Its tensors are converted to the data type of the "
        f"computation when they are loaded, so they need more memory."
    )


def _workload(options: PlanOptions, load: WorkloadOptions) -> PlannedWorkload:
    from chairlift.lab.bench.workload_options import DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN
    from chairlift.lab.planning.planned_workload import PlannedWorkload
    from chairlift.lab.workload.lengths import parse_lengths

    max_tokens, rate = options.max_tokens, load.request_rate
    if max_tokens is not None and max_tokens.isdecimal():
        max_tokens = f"fixed:{max_tokens}"
    return PlannedWorkload(
        input_len=parse_lengths(load.input_len or DEFAULT_INPUT_LEN),
        output_len=parse_lengths(load.output_len or DEFAULT_OUTPUT_LEN),
        max_tokens=None if max_tokens is None else parse_lengths(max_tokens),
        request_rate=None if rate is None or rate == math.inf else rate / options.replicas,
        seed=load.seed,
    )
