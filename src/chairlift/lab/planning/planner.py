"""What an engine will hold and how fast it will be, before anything is loaded.

    memory  =  weights  +  activations  +  KV pool  =  blocks x block bytes

The blocks are those of the engine, not an estimate: both take them from `plan_kv_cache`, and the requests that fit are
counted with the engine's own KV managers.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from chairlift.config import KV_ARENAS, KV_POLICIES, EngineConfig, SchedulerConfig
from chairlift.engine.startup.memory_plan import (
    DTYPE_BYTES,
    MemoryItem,
    StepLimits,
    kv_slot_bytes,
    total,
)
from chairlift.engine.startup.model_shape import ModelShape
from chairlift.engine.startup.native_memory_plan import MatrixFormats, native_read_bytes
from chairlift.engine.startup.pool_capacity import KVPool, PoolCapacity, RequestLengths, compute_pool_capacity
from chairlift.engine.startup.startup_plan import plan_pool, planned_activations, planned_pool, planned_weights
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.lab.planning.request_lengths import accepted, draw_lengths
from chairlift.lab.planning.speed import Speed, plan_speed, take_load
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.arrivals import arrival_process
from chairlift.lab.workload.lengths import LengthDistribution
from chairlift.models.config import ModelConfig
from chairlift.models.torch_operations import fallback_note, torch_operations
from chairlift.worker.kv_cache_plan import KVCachePlan
from chairlift.worker.memory import format_memory

MAX_DRAWS: Final = 20
MAX_COUNTED: Final = 10_000
"""How often requests that fit are counted under a policy, and how many of them in all."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model before it is loaded.

    Attributes:
        name: for people; argument: what `chairlift serve` takes; note: what is to be known of both.
        formats: of the matrices in its file, see `loading.resolve.matrix_formats`.
    """

    name: str
    argument: str
    config: ModelConfig
    formats: MatrixFormats
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests that are planned for.

    Attributes:
        max_tokens: what they ask for; their true output lengths if None.
        request_rate: Poisson arrivals a second in the simulation; None: all at once.

    Raises:
        ConfigError: request_rate is not positive.
    """

    prompt_len: LengthDistribution
    output_len: LengthDistribution
    max_tokens: LengthDistribution | None = None
    request_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_rate == math.inf:
            object.__setattr__(self, "request_rate", None)
        arrival_process(self.request_rate)
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")

    def lengths(self, max_model_len: int) -> Iterator[RequestLengths]:
        """As `draw_lengths`."""
        return draw_lengths(self.prompt_len, self.output_len, self.max_tokens, max_model_len, self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "prompt_len": str(self.prompt_len),
            "output_len": str(self.output_len),
            "max_tokens": None if self.max_tokens is None else str(self.max_tokens),
            "request_rate": self.request_rate,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the bytes go.

    Attributes:
        memory_bytes: of everything; None if the pool's own size was given.
        free_share: of what weights and activations leave of it, the share that K and V get.
        kv_bytes: for the pool; None if it was given in blocks.
        limits: of the step that activations are planned for.
        max_model_len: as the engine settles it.
    """

    choice: KernelChoice
    memory_bytes: int | None
    free_share: float
    limits: StepLimits
    weights: list[MemoryItem]
    activations: list[MemoryItem]
    slot_bytes: int
    kv_bytes: int | None
    pool: KVCachePlan
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PolicyFit:
    """What fits under one policy.

    Attributes:
        draws: `fit.num_fit`, and the same for other draws of lengths, as many as take little time.
    """

    fit: PoolCapacity
    draws: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """What `make_plan` found; `policies` has every policy over the same blocks and lengths, that of `fit` included."""

    model: PlannedModel
    config: EngineConfig
    load: Load
    memory: MemoryPlan
    fit: PoolCapacity
    policies: list[PolicyFit]
    speed: Speed | None
    serve: str
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; bytes and seconds."""
        memory = self.memory
        return {
            "model": self.model.name,
            "load": self.load.to_dict(),
            "kernels": memory.choice.kernels,
            "dtype": memory.choice.dtype,
            "kv_cache_dtype": memory.choice.kv_cache_dtype,
            "quantization": memory.choice.quantization,
            "memory_bytes": memory.memory_bytes,
            "weight_bytes": total(memory.weights),
            "activation_bytes": total(memory.activations),
            "kv_bytes": memory.pool.num_bytes,
            "kv_bytes_per_slot": memory.slot_bytes,
            "num_kv_blocks": memory.pool.num_blocks,
            "block_size": memory.pool.block_size,
            "limited_by": memory.pool.limited_by,
            "max_model_len": memory.max_model_len,
            "fit": asdict(self.fit),
            "policies": [{**asdict(each.fit), "draws": each.draws} for each in self.policies],
            "speed": None if self.speed is None else self.speed.to_dict(),
            "serve": self.serve,
            "notes": self.notes,
        }


def make_plan(
    model: PlannedModel,
    config: EngineConfig,
    load: Load,
    *,
    memory_bytes: int | None = None,
    free_share: float = 1.0,
    hardware: Device | None = None,
) -> Plan:
    """Plan an engine.

    Args:
        config: as `chairlift serve` would get it; `model` in it is not looked at.
        memory_bytes: for weights, activations and K and V together; not with `config.num_kv_blocks` or
            `config.kv_cache_memory`, and needed without them.
        free_share: of what weights and activations leave, the share that K and V get.
        hardware: that steps are timed on, by its roofline; without it no time is predicted.

    Raises:
        ConfigError: the memory is too small, or an option cannot be honoured, with the arithmetic.
    """
    if hardware is None and load.request_rate is not None:
        raise ConfigError(
            f"request_rate={load.request_rate:g} is simulated on a device, and none is known: give device"
        )
    memory = plan_memory(model, config, memory_bytes, free_share)
    context, num_blocks = model.config.max_position_embeddings, memory.pool.num_blocks
    pool = planned_pool(config, context, num_blocks)
    limits = config.scheduler_config(pool.max_model_len)
    fit = compute_pool_capacity(pool, limits, load.lengths(pool.max_model_len))
    policies = [_under_policy(other, context, num_blocks, limits, load) for other in every_policy(config)]
    speed = None
    if hardware is not None and fit.num_running:
        speed = _speed(hardware, model, memory, pool, limits, fit, load)
    return Plan(
        model=model,
        config=config,
        load=load,
        memory=memory,
        fit=fit,
        policies=policies,
        speed=speed,
        serve=serve_command(model, config, memory),
        notes=[
            *_notes(model, config, fit),
            *_kernel_notes(model, memory.choice),
            *_time_notes(hardware, memory.choice.dtype),
        ],
    )


def plan_memory(
    model: PlannedModel, config: EngineConfig, memory_bytes: int | None, free_share: float = 1.0
) -> MemoryPlan:
    """The memory's share of `make_plan`."""
    model_config, device = model.config, config.device.split(":")[0]
    choice = choose_kernels(config, model_config.dtype)
    context = model_config.max_position_embeddings
    limits = StepLimits(
        config.largest_token_budget, config.max_num_seqs, config.max_model_len or context, config.block_size
    )
    weights = planned_weights(model_config, choice, device, model.formats)
    activations = planned_activations(model_config, choice, device, limits)
    kv_bytes = config.kv_cache_memory
    if config.num_kv_blocks is None and kv_bytes is None:
        kv_bytes = _left_for_kv(memory_bytes, total(weights), total(activations), free_share)
    elif memory_bytes is not None:
        raise ConfigError("memory is what the KV pool is cut from: give memory, kv_cache_memory or num_kv_blocks")
    slot_bytes = kv_slot_bytes(model_config, choice.kv_cache_dtype)
    pool = plan_pool(config, slot_bytes, context, kv_bytes or 0)
    max_model_len = planned_pool(config, context, pool.num_blocks).max_model_len
    return MemoryPlan(
        choice=choice,
        memory_bytes=memory_bytes,
        free_share=free_share,
        limits=limits,
        weights=weights,
        activations=activations,
        slot_bytes=slot_bytes,
        kv_bytes=kv_bytes,
        pool=pool,
        max_model_len=max_model_len,
    )


def _left_for_kv(memory_bytes: int | None, weights: int, activations: int, free_share: float) -> int:
    if memory_bytes is None:
        raise ConfigError("how much memory there is must be known: give memory, kv_cache_memory or num_kv_blocks")
    left = int((memory_bytes - weights - activations) * free_share)
    if left <= 0:
        raise ConfigError(
            f"memory={format_memory(memory_bytes)} leaves nothing for K and V: the weights take "
            f"{format_memory(weights)} and the activations of a step up to {format_memory(activations)}. Give more, "
            f"choose a smaller dtype or model, or lower max_num_batched_tokens, max_num_seqs or max_model_len"
        )
    return left


def every_policy(config: EngineConfig) -> list[EngineConfig]:
    """The same engine under every policy, reservations out of every arena."""
    return [
        replace(config, kv=kv, kv_arena=arena, enable_prefix_caching=None)
        for kv in KV_POLICIES
        for arena in (("buddy",) if kv == "paged" else KV_ARENAS)
    ]


def _under_policy(
    config: EngineConfig, context: int, num_blocks: int, limits: SchedulerConfig, load: Load
) -> PolicyFit:
    """The same lengths under each policy, whatever `max_model_len` it would settle on."""
    try:
        pool = planned_pool(config, context, num_blocks)
    except ConfigError as error:
        pool = KVPool(num_blocks, config.block_size, limits.max_model_len, config.kv, config.kv_arena)
        return PolicyFit(PoolCapacity(pool, 0, 0, "memory", error=str(error)), [0])

    def count(seed: int) -> PoolCapacity:
        return compute_pool_capacity(pool, limits, replace(load, seed=seed).lengths(limits.max_model_len))

    fit = count(load.seed)
    num_draws = min(MAX_DRAWS, max(1, MAX_COUNTED // max(1, fit.num_fit)))
    return PolicyFit(fit, [fit.num_fit, *(count(load.seed + i).num_fit for i in range(1, num_draws))])


def _speed(
    hardware: Device,
    model: PlannedModel,
    memory: MemoryPlan,
    pool: KVPool,
    limits: SchedulerConfig,
    fit: PoolCapacity,
    load: Load,
) -> Speed:
    shape = _shape(model, memory)
    sim = SimConfig(limits, pool.num_blocks, pool.block_size, pool.kv, pool.kv_arena, None, shape)
    lengths = take_load(accepted(pool, load.lengths(pool.max_model_len)), fit.num_running)
    return plan_speed(Roofline(shape, hardware), sim, lengths, fit.num_running, load.request_rate, load.seed)


def _shape(model: PlannedModel, memory: MemoryPlan) -> ModelShape:
    """The model as it is kept in memory."""
    shape = ModelShape.from_config(model.config, model.name, DTYPE_BYTES[memory.choice.dtype])
    if memory.choice.kernels == "native":
        read = native_read_bytes(model.config, model.formats, memory.choice.quantization)
        shape = replace(shape, bytes_per_weight=shape.bytes_per_weight * read / shape.weight_bytes)
    return replace(shape, bytes_per_kv_value=memory.slot_bytes / model.config.kv_values_per_token)


def serve_command(model: PlannedModel, config: EngineConfig, memory: MemoryPlan) -> str:
    """The command that starts the planned engine: it has exactly the planned blocks."""
    options: dict[str, object] = {
        "device": config.device,
        "dtype": memory.choice.dtype,
        "kernels": memory.choice.kernels,
        "kv-cache-dtype": memory.choice.kv_cache_dtype,
        "max-model-len": memory.max_model_len,
        "block-size": config.block_size,
        "num-kv-blocks": memory.pool.num_blocks,
        "max-num-seqs": config.max_num_seqs,
        "batching": config.batching,
        "kv": config.kv,
    }
    if config.max_num_batched_tokens is not None:
        options["max-num-batched-tokens"] = config.max_num_batched_tokens
    if config.quantization is not None:
        options["quantization"] = config.quantization
    if config.kv != "paged":
        options["kv-arena"] = config.kv_arena
    if config.batching == "static":
        options["static-batch-size"] = config.scheduler_config(memory.max_model_len).static_batch_size
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return shlex.join(["chairlift", "serve", model.argument, *words])


def _notes(model: PlannedModel, config: EngineConfig, fit: PoolCapacity) -> list[str]:
    notes = [] if model.note is None else [model.note]
    if fit.limited_by != "memory":
        notes.append(
            f"The pool holds {fit.num_fit} such requests, and {fit.limited_by}={fit.num_running} is what limits the "
            f"batch: raise it to use the memory."
        )
    if config.kv in ("pow2", "oracle"):
        notes.append(f"kv={config.kv} serves only requests whose output length is forced (ignore_eos and max_tokens).")
    return notes


def _kernel_notes(model: PlannedModel, choice: KernelChoice) -> list[str]:
    operations = torch_operations(model.config) if choice.kernels == "native" else []
    return [fallback_note(operations)] if operations else []


def _time_notes(hardware: Device | None, dtype: str) -> list[str]:
    if hardware is None:
        return [
            "No times: nothing is known of how fast this device is. Measure it with `chairlift simulate --calibrate "
            "FILE` and give --device FILE, or name one (A100-40GB, ...)."
        ]
    if hardware.bytes_per_value != DTYPE_BYTES[dtype]:
        return [
            f"The peak of {hardware.name} is for {hardware.bytes_per_value}-byte values, and {dtype} has "
            f"{DTYPE_BYTES[dtype]}: what is limited by computing will take another time than predicted."
        ]
    return []
