"""Finds the model, the device, the memory and the workload of a plan by their names, and plans the deployment."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from chairlift.config import EngineConfig
from chairlift.engine.startup.pool_plan import FREE_MEMORY_SHARE
from chairlift.engine.startup.required_memory import SERVER_PROCESSES_BYTES
from chairlift.errors import ConfigError
from chairlift.kernels.choice import choose_kernels
from chairlift.lab.bench.workload_options import DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, WorkloadOptions
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.planning.planner import DeploymentPlan, PlannedModel, make_plan
from chairlift.lab.sim.devices import DEVICES, Device, find_device
from chairlift.lab.sim.model_shape import MODEL_SHAPES
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.loading.model_source import ModelSource, choose_predictor, declared_formats
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.system.memory_amounts import format_memory
from chairlift.worker.memory import available_memory

CPU: Final = "cpu"
CUDA: Final = "cuda"


def plan_deployment(
    config: EngineConfig,
    load: WorkloadOptions,
    *,
    device: str,
    memory_bytes: int | None,
    max_tokens: str | None,
    replicas: int,
) -> DeploymentPlan:
    """Plan the engine of a model, or of a shape, on a device.

    Args:
        config: the options of the engine, whose `device` has no effect.
        device: cpu, cuda, the name of a known device, or a calibration file, which describes a CPU.
        memory_bytes: memory for processes, weights, activations, K and V together; None for that of this machine.
        max_tokens: the distribution of `max_tokens`, or a number; None for the true output lengths.

    Raises:
        ModelLoadError: the name of the model is neither a shape nor a model.
        ConfigError: the device or its memory is unknown, the memory is too small, or an option cannot be honoured.
    """
    kind, hardware = _find_hardware(device)
    # The machine that plans for a GPU need not have its kernels.
    kernels = "triton" if kind == CUDA and config.kernels == "auto" else config.kernels
    config = replace(config, device=kind, kernels=kernels)
    memory_bytes, free_share = _memory(memory_bytes, config, hardware)
    return make_plan(
        _find_model(config),
        config,
        _workload(load, max_tokens, replicas),
        memory_bytes=memory_bytes,
        free_share=free_share,
        hardware=hardware,
        replicas=replicas,
        process_bytes=SERVER_PROCESSES_BYTES if kind == CPU else 0,
    )


def _find_hardware(name: str) -> tuple[str, Device | None]:
    """The device of the engine, and its hardware if it is known."""
    if name in (CPU, CUDA):
        return name, None
    return CUDA if name in DEVICES else CPU, find_device(name)


def _memory(given: int | None, config: EngineConfig, hardware: Device | None) -> tuple[int | None, float]:
    """The memory in bytes, and the share of the memory left by weights and activations that K and V get.

    The share is 1 if the memory is given, else the same as in `chairlift serve`.
    """
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


def _find_model(config: EngineConfig) -> PlannedModel:
    """Find the shape, or read the configuration of the model without its weights."""
    name, needs_predictor = config.model, config.needs_predictor
    if name in MODEL_SHAPES:
        shape, argument = choose_predictor(MODEL_SHAPES[name].config, name, needs_predictor), f"FOLDER-OF-{name}"
        advice = f"replace {argument} by the folder of the model or its name on the hub."
        note = f"{name} is a shape without weights: {advice}"
        return PlannedModel(name, argument, shape, declared_formats(shape), note)
    source = resolve_model(name)
    read = source.decoder_config(needs_predictor=needs_predictor)
    return PlannedModel(source.name, name or source.name, read, source.formats(read), _file_note(source, read, config))


def _file_note(source: ModelSource, model_config: ModelConfig, config: EngineConfig) -> str | None:
    """A note if the kernels do not read the quantized formats of the file."""
    if not source.is_quantized(model_config) or choose_kernels(config, model_config.dtype).kernels != "torch":
        return None
    file_bytes = sum(file.stat().st_size for file in source.weight_files())
    return (
        f"The file has {format_memory(file_bytes)}. Its tensors are converted to the data type of the "
        f"computation when they are loaded, so they need more memory."
    )


def _workload(load: WorkloadOptions, max_tokens: str | None, replicas: int) -> PlannedWorkload:
    rate = load.request_rate
    if max_tokens is not None and max_tokens.isdecimal():
        max_tokens = f"fixed:{max_tokens}"
    return PlannedWorkload(
        input_len=parse_lengths(load.input_len or DEFAULT_INPUT_LEN),
        output_len=parse_lengths(load.output_len or DEFAULT_OUTPUT_LEN),
        max_tokens=None if max_tokens is None else parse_lengths(max_tokens),
        request_rate=None if rate is None or rate == math.inf else rate / replicas,
        seed=load.seed,
    )
