"""Plans the memory, the concurrent requests and the speed of an engine before its model is loaded.

    memory  =  weights  +  activations  +  KV pool  =  blocks x block bytes

The number of blocks is exactly that of the engine: both compute it with `plan_pool`. Requests are counted with the
KV managers of the engine.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from chairlift.config import KV_ARENAS, KV_POLICIES, EngineConfig, SchedulerConfig
from chairlift.core.baselines.selection import KVPool
from chairlift.engine.startup.memory_plan import (
    DTYPE_BYTES,
    MemoryItem,
    kv_slot_bytes,
    total,
)
from chairlift.engine.startup.model_shape import ModelShape
from chairlift.engine.startup.native_memory_plan import MatrixFormats, native_read_bytes
from chairlift.engine.startup.pool_capacity import PoolCapacity, compute_pool_capacity
from chairlift.engine.startup.startup_plan import (
    plan_layout,
    plan_pool,
    planned_activations,
    planned_pool,
    planned_weights,
)
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice, choose_kernels
from chairlift.lab.planning.planned_workload import PlannedWorkload, accepted_lengths
from chairlift.lab.planning.predicted_speed import PredictedSpeed, predict_speed
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.models.declaration import ModelConfig
from chairlift.models.kv_layout import KVLayout
from chairlift.models.torch_operations import fallback_note, torch_operations
from chairlift.worker.kv_cache_plan import KVCachePlan
from chairlift.worker.memory import format_memory

MAX_DRAWS: Final = 20
"""Maximum number of draws of lengths for which the requests that fit are counted under a policy."""

MAX_COUNTED: Final = 10_000
"""Maximum number of requests counted in all draws."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model before it is loaded.

    Attributes:
        name: name in the report.
        argument: the argument MODEL of `chairlift serve`.
        formats: formats of the matrices in its file (see `loading.resolve.matrix_formats`).
        note: a remark for the report.
    """

    name: str
    argument: str
    config: ModelConfig
    formats: MatrixFormats
    note: str | None = None


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory of a planned engine.

    Attributes:
        memory_bytes: memory of the engine; None if the size of the pool is given.
        free_share: share of the memory left by weights and activations that K and V get.
        limits: limits of the step that the activations are planned for.
        weights, activations: the items of each kind.
        token_bytes: bytes of K and V of one token in all layers.
        slot_bytes: the same in the layers of one group (see `models.kv_layout`).
        kv_bytes: memory for the pool; None if it is given in blocks.
        layout: the groups of layers with block tables of their own.
        max_model_len: as the engine resolves it.
    """

    choice: KernelChoice
    memory_bytes: int | None
    free_share: float
    limits: SchedulerConfig
    weights: list[MemoryItem]
    activations: list[MemoryItem]
    token_bytes: int
    slot_bytes: int
    kv_bytes: int | None
    pool: KVCachePlan
    layout: KVLayout
    max_model_len: int


@dataclass(frozen=True, slots=True)
class PolicyFit:
    """The requests that fit under one policy.

    Attributes:
        fit: the capacity for the lengths of the workload.
        draws: `num_fit` for the lengths of the workload and for other draws of lengths.
    """

    fit: PoolCapacity
    draws: list[int]


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    """The plan of an engine.

    Attributes:
        fit: the capacity under the configured policy.
        policies: the capacity under every policy with the same memory and lengths, including the configured one.
        speed: the predicted speed; None without a known device.
        serve: the command that starts the planned engine.
        notes: remarks for the report.
        replicas: the number of engines of which each is planned.
    """

    model: PlannedModel
    config: EngineConfig
    load: PlannedWorkload
    memory: PlannedMemory
    fit: PoolCapacity
    policies: list[PolicyFit]
    speed: PredictedSpeed | None
    serve: str
    notes: list[str] = field(default_factory=list)
    replicas: int = 1

    def for_each_of(self, replicas: int) -> DeploymentPlan:
        """The same plan for each of several replicas on one machine. The caller has divided memory and requests."""
        note = (
            f"The plan is that of each of {replicas} replicas, which share the memory and the requests; together they "
            f"run {replicas * self.fit.num_running} requests."
        )
        serve = f"{self.serve} --replicas {replicas}"
        return replace(self, replicas=replicas, serve=serve, notes=[note, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """The plan for JSON, in bytes and seconds."""
        memory = self.memory
        return {
            "model": self.model.name,
            "replicas": self.replicas,
            "load": self.load.to_dict(),
            "kernels": memory.choice.kernels,
            "dtype": memory.choice.dtype,
            "kv_cache_dtype": memory.choice.kv_cache_dtype,
            "quantization": memory.choice.quantization,
            "memory_bytes": memory.memory_bytes,
            "weight_bytes": total(memory.weights),
            "activation_bytes": total(memory.activations),
            "kv_bytes": memory.pool.num_bytes,
            "kv_bytes_per_token": memory.token_bytes,
            "kv_bytes_per_slot": memory.slot_bytes,
            "kv_windows": memory.pool.windows,
            "num_kv_blocks": memory.pool.num_blocks,
            "block_size": memory.pool.block_size,
            "limited_by": memory.pool.limited_by,
            "max_model_len": memory.max_model_len,
            "fit": asdict(self.fit),
            "policies": [{**asdict(each.fit), "draws": each.draws} for each in self.policies],
            "speed": None if self.speed is None else asdict(self.speed),
            "serve": self.serve,
            "notes": self.notes,
        }


def make_plan(
    model: PlannedModel,
    config: EngineConfig,
    load: PlannedWorkload,
    *,
    memory_bytes: int | None = None,
    free_share: float = 1.0,
    hardware: Device | None = None,
) -> DeploymentPlan:
    """Plan an engine.

    Args:
        config: the configuration of `chairlift serve`; its `model` is ignored.
        memory_bytes: memory for weights, activations, K and V together. It is required unless `config` has
            num_kv_blocks or kv_cache_memory_bytes, which it cannot be combined with.
        free_share: share of the memory left by weights and activations that K and V get.
        hardware: the device whose roofline times the steps; None predicts no times.

    Raises:
        ConfigError: the memory is too small, or an option cannot be honoured. The message has the arithmetic.
    """
    if hardware is None and load.request_rate is not None:
        raise ConfigError(
            f"request_rate={load.request_rate:g} needs a device to simulate: name one with device, or leave it out"
        )
    memory = plan_memory(model, config, memory_bytes, free_share)
    context, num_blocks = model.config.max_position_embeddings, memory.pool.num_blocks
    pool = planned_pool(config, context, num_blocks, memory.pool.windows)
    limits = config.scheduler_config(pool.max_model_len)
    fit = compute_pool_capacity(pool, limits, load.lengths(pool.max_model_len))
    every_policy = [(kv, arena) for kv in KV_POLICIES for arena in (("buddy",) if kv == "paged" else KV_ARENAS)]
    configs = [replace(config, kv=kv, kv_arena=arena, enable_prefix_caching=None) for kv, arena in every_policy]
    policies = [_policy_fit(other, model.config, memory, limits, load) for other in configs]
    speed = None
    if hardware is not None and fit.num_running:
        shape = _shape(model, memory)
        sim = SimConfig(limits, pool.num_blocks, pool.block_size, pool.kv, pool.kv_arena, None, shape, pool.windows)
        speed = predict_speed(Roofline(shape, hardware), sim, accepted_lengths(pool, load), fit.num_running, load)
    return DeploymentPlan(
        model=model,
        config=config,
        load=load,
        memory=memory,
        fit=fit,
        policies=policies,
        speed=speed,
        serve=serve_command(model, config, memory),
        notes=_notes(model, config, fit, memory.choice, hardware),
    )


def plan_memory(
    model: PlannedModel, config: EngineConfig, memory_bytes: int | None, free_share: float = 1.0
) -> PlannedMemory:
    """Plan the memory of an engine (see `make_plan`)."""
    model_config, device = model.config, config.device.split(":")[0]
    choice = choose_kernels(config, model_config.dtype)
    context = model_config.max_position_embeddings
    limits = config.scheduler_config(config.max_model_len or context)
    weights = planned_weights(model_config, choice, device, model.formats, config)
    layout = plan_layout(config, model_config)
    activations = planned_activations(model_config, choice, device, limits, config.block_size, layout)
    kv_bytes = config.kv_cache_memory_bytes
    if config.num_kv_blocks is None and kv_bytes is None:
        kv_bytes = _left_for_kv(memory_bytes, total(weights), total(activations), free_share)
    elif memory_bytes is not None:
        raise ConfigError("memory cannot be combined: give memory, kv_cache_memory_bytes or num_kv_blocks")
    slot_bytes = kv_slot_bytes(model_config, choice.kv_cache_dtype, layout)
    pool = plan_pool(config, slot_bytes, context, kv_bytes or 0, layout.windows)
    max_model_len = planned_pool(config, context, pool.num_blocks, pool.windows).max_model_len
    return PlannedMemory(
        choice=choice,
        memory_bytes=memory_bytes,
        free_share=free_share,
        limits=limits,
        weights=weights,
        activations=activations,
        token_bytes=kv_slot_bytes(model_config, choice.kv_cache_dtype),
        slot_bytes=slot_bytes,
        kv_bytes=kv_bytes,
        pool=pool,
        layout=layout,
        max_model_len=max_model_len,
    )


def _left_for_kv(memory_bytes: int | None, weights: int, activations: int, free_share: float) -> int:
    if memory_bytes is None:
        raise ConfigError("the size of the memory is unknown: give memory, kv_cache_memory_bytes or num_kv_blocks")
    left = int((memory_bytes - weights - activations) * free_share)
    if left <= 0:
        raise ConfigError(
            f"memory={format_memory(memory_bytes)} leaves nothing for K and V: the weights take "
            f"{format_memory(weights)} and the activations of a step up to {format_memory(activations)}. Give more "
            f"memory, choose a smaller dtype or model, or lower max_num_batched_tokens, max_num_seqs or max_model_len"
        )
    return left


def _policy_fit(
    config: EngineConfig,
    model_config: ModelConfig,
    memory: PlannedMemory,
    limits: SchedulerConfig,
    load: PlannedWorkload,
) -> PolicyFit:
    """Count the requests that fit under one policy. The lengths are the same for all policies."""
    layout = plan_layout(config, model_config)
    slot_bytes = kv_slot_bytes(model_config, memory.choice.kv_cache_dtype, layout)
    num_blocks = memory.pool.num_blocks * memory.slot_bytes // slot_bytes
    try:
        pool = planned_pool(config, model_config.max_position_embeddings, num_blocks, layout.windows)
    except ConfigError as error:
        pool = KVPool(num_blocks, config.block_size, limits.max_model_len, config.kv, config.kv_arena)
        return PolicyFit(PoolCapacity(pool, 0, 0, "memory", error=str(error)), [0])

    def count(seed: int) -> PoolCapacity:
        return compute_pool_capacity(pool, limits, replace(load, seed=seed).lengths(limits.max_model_len))

    fit = count(load.seed)
    num_draws = min(MAX_DRAWS, max(1, MAX_COUNTED // max(1, fit.num_fit)))
    return PolicyFit(fit, [fit.num_fit, *(count(load.seed + i).num_fit for i in range(1, num_draws))])


def _shape(model: PlannedModel, memory: PlannedMemory) -> ModelShape:
    """The shape of the model, with the bytes per weight and per KV value in the planned data types."""
    shape = ModelShape.from_config(model.config, model.name, DTYPE_BYTES[memory.choice.dtype])
    if memory.choice.kernels == "native":
        read = native_read_bytes(model.config, model.formats, memory.choice.quantization)
        shape = replace(shape, bytes_per_weight=shape.bytes_per_weight * read / shape.weight_bytes)
    return replace(shape, bytes_per_kv_value=memory.token_bytes / model.config.kv_values_per_token)


def serve_command(model: PlannedModel, config: EngineConfig, memory: PlannedMemory) -> str:
    """The command that starts an engine with exactly the planned blocks."""
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
    if config.num_loras:
        options |= {"max-loras": config.num_loras, "max-lora-rank": config.max_lora_rank}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if config.disable_hybrid_kv_cache_manager:
        words.append("--disable-hybrid-kv-cache-manager")
    return shlex.join(["chairlift", "serve", model.argument, *words])


def _notes(
    model: PlannedModel, config: EngineConfig, fit: PoolCapacity, choice: KernelChoice, hardware: Device | None
) -> list[str]:
    notes = [] if model.note is None else [model.note]
    if fit.limited_by != "memory":
        notes.append(
            f"The pool holds {fit.num_fit} such requests, but {fit.limited_by}={fit.num_running} limits the batch: "
            f"raise it to use the memory."
        )
    if config.kv in ("pow2", "oracle"):
        notes.append(f"kv={config.kv} serves only requests whose output length is forced (ignore_eos and max_tokens).")
    if choice.kernels == "native" and (operations := torch_operations(model.config)):
        notes.append(fallback_note(operations))
    value_bytes = DTYPE_BYTES[choice.dtype]
    if hardware is None:
        notes.append(
            "No speed is predicted, because the speed of this device is unknown. Measure it with `chairlift simulate "
            "--calibrate FILE` and give --device FILE, or name a known device (A100-40GB, ...)."
        )
    elif hardware.bytes_per_value != value_bytes:
        notes.append(
            f"The peak of {hardware.name} is for {hardware.bytes_per_value}-byte values, and {choice.dtype} has "
            f"{value_bytes}: the predicted times of steps that are limited by computing are wrong."
        )
    return notes
