"""Plans the memory, the concurrent requests and the speed of an engine before its model is loaded.

    memory  =  weights  +  activations  +  KV pool  =  blocks x block bytes

The engine has exactly the planned number of blocks: both compute it with `plan_pool`. Requests are counted with the
KV managers of the engine.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from chairlift.config import KV_ARENAS, KV_CACHE_DTYPES, KV_POLICIES, EngineConfig, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.engine.startup.memory_plan import MemoryPlan, plan_memory
from chairlift.engine.startup.pool_capacity import PoolCapacity, compute_pool_capacity
from chairlift.engine.startup.pool_plan import kv_slot_bytes, plan_layout, planned_pool
from chairlift.engine.startup.weight_plan import MatrixFormats, step_weight_bytes
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice
from chairlift.kernels.kernel_memory import DTYPE_BYTES, total
from chairlift.lab.planning.planned_workload import PlannedWorkload, accepted_lengths
from chairlift.lab.planning.predicted_speed import PredictedSpeed, predict_speed
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.kernel_roofline import device_roofline
from chairlift.lab.sim.model_shape import ModelShape
from chairlift.lab.sim.roofline import block_copy_seconds
from chairlift.lab.sim.simulator import SimConfig
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.torch_operations import fallback_notes
from chairlift.policy_class import reserves
from chairlift.system.memory_amounts import format_memory

MAX_DRAWS: Final = 20
"""Maximum number of draws of lengths for which the requests that fit are counted under a policy."""

MAX_COUNTED: Final = 10_000
"""Maximum number of requests counted in all draws."""

POOL_FIELDS: Final = ("kv_bytes", "state_bytes", "num_states", "num_draft_states", "num_checkpoints",
                      "checkpoint_interval", "num_swap_blocks", "swap_bytes", "block_size", "limited_by")  # fmt: skip
"""The fields of the pool in the JSON line."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model before it is loaded.

    Attributes:
        name: name in the report.
        argument: the argument MODEL of `chairlift serve`.
        formats: formats of the matrices in its file, see `ModelSource.formats`.
        note: a remark for the report.
    """

    name: str
    argument: str
    config: ModelConfig
    formats: MatrixFormats
    note: str | None = None


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
        process_bytes: memory of the processes themselves, which the plan leaves to them.
    """

    model: PlannedModel
    config: EngineConfig
    load: PlannedWorkload
    memory: MemoryPlan
    fit: PoolCapacity
    policies: list[PolicyFit]
    speed: PredictedSpeed | None
    serve: str
    notes: list[str]
    replicas: int
    process_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The plan for JSON, in bytes and seconds."""
        memory, pool = self.memory, self.memory.pool
        return {
            "model": self.model.name,
            "replicas": self.replicas,
            "load": self.load.to_dict(),
            **{name: getattr(memory.choice, name) for name in ("kernels", "dtype", "kv_cache_dtype", "quantization")},
            "memory_bytes": None if memory.memory_bytes is None else memory.memory_bytes + self.process_bytes,
            "process_bytes": self.process_bytes,
            "weight_bytes": total(memory.weights),
            "activation_bytes": total(memory.activations),
            **{name: getattr(pool, name) for name in POOL_FIELDS},
            "kv_bytes_per_token": memory.token_bytes,
            "kv_bytes_per_slot": memory.slot_bytes,
            "kv_windows": pool.windows,
            "num_kv_blocks": pool.num_blocks,
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
    replicas: int = 1,
    process_bytes: int = 0,
) -> DeploymentPlan:
    """Plan an engine, or each of several replicas on one machine.

    Args:
        config: the configuration of `chairlift serve`; its `model` is ignored.
        memory_bytes: memory for processes, weights, activations, K and V together. It is required unless `config` has
            num_kv_blocks or kv_cache_memory_bytes, which it cannot be combined with. Replicas share it equally.
        free_share: share of the memory left by weights and activations that K and V get.
        hardware: the device whose roofline times the steps; None predicts no times.

    Raises:
        ConfigError: the memory is too small, or an option cannot be honoured. The message has the arithmetic.
    """
    _check(config, load, memory_bytes, hardware)
    own_bytes, budget = None if memory_bytes is None else memory_bytes // replicas, None
    if own_bytes is not None and process_bytes:
        budget = f"memory={format_memory(own_bytes)} without {format_memory(process_bytes)} for the processes"
        own_bytes = max(0, own_bytes - process_bytes)
    memory = plan_memory(config, model.config, model.formats, own_bytes, free_share, budget=budget)
    pool = memory.kv_pool
    limits = replace(config.scheduler_config(pool.max_model_len), speculative_config=None)
    fit = compute_pool_capacity(pool, limits, load.lengths(pool.max_model_len))
    every_policy = [(kv, arena) for kv in KV_POLICIES for arena in (("buddy",) if kv == "paged" else KV_ARENAS)]
    common = replace(config, enable_prefix_caching=None, preemption_mode="recompute", swap_space=None)
    configs = [replace(common, kv=kv, kv_arena=arena) for kv, arena in every_policy]
    policies = [_policy_fit(other, model.config, memory, limits, load) for other in configs]
    speed = None
    if hardware is not None and fit.num_running:
        sim = _sim_config(model, config, memory, limits, hardware)
        assert sim.model is not None
        lengths = accepted_lengths(pool, load)
        speed = predict_speed(device_roofline(sim.model, hardware), sim, lengths, fit.num_running, load)
    serve, notes = serve_command(model, config, memory), _notes(model, config, fit, memory.choice, hardware)
    if replicas > 1:
        serve += f" --replicas {replicas}"
        shared = f"The plan applies to each of {replicas} replicas, which share the memory and the requests; together "
        notes.insert(0, f"{shared}they run {replicas * fit.num_running} requests.")
    return DeploymentPlan(model, config, load, memory, fit, policies, speed, serve, notes, replicas, process_bytes)


def _check(config: EngineConfig, load: PlannedWorkload, memory_bytes: int | None, hardware: Device | None) -> None:
    """Raises ConfigError for what cannot be planned."""
    if config.speculative is not None and config.speculative.model is not None:
        raise ConfigError(
            f"speculative_config has model={config.speculative.model!r}, but a plan does not count the memory of a "
            "draft model: plan without it, with a smaller memory"
        )
    if hardware is None and load.request_rate is not None:
        raise ConfigError(
            f"request_rate={load.request_rate:g} needs a device to simulate: name one with device, or leave it out"
        )
    if memory_bytes is not None and (config.num_kv_blocks or config.kv_cache_memory_bytes) is not None:
        raise ConfigError("memory cannot be combined: give memory, kv_cache_memory_bytes or num_kv_blocks")


def _policy_fit(
    config: EngineConfig,
    model_config: ModelConfig,
    memory: MemoryPlan,
    limits: SchedulerConfig,
    load: PlannedWorkload,
) -> PolicyFit:
    """Count the requests that fit under one policy. The lengths are the same for all policies."""
    layout = plan_layout(config, model_config)
    slot_bytes = kv_slot_bytes(model_config, memory.choice.kv_cache_dtype, layout)
    num_blocks = memory.pool.num_blocks * memory.slot_bytes // slot_bytes
    plan = replace(memory.pool, num_blocks=num_blocks, windows=layout.windows, state_bytes=0, num_swap_blocks=0)
    try:
        pool = planned_pool(config, model_config.max_position_embeddings, plan)
    except ConfigError as error:
        pool = KVPool(num_blocks, config.block_size, limits.max_model_len, config.kv, config.kv_arena)
        return PolicyFit(PoolCapacity(pool, 0, 0, "memory", error=str(error)), [0])

    def count(seed: int) -> PoolCapacity:
        return compute_pool_capacity(pool, limits, replace(load, seed=seed).lengths(limits.max_model_len))

    fit = count(load.seed)
    num_draws = min(MAX_DRAWS, max(1, MAX_COUNTED // max(1, fit.num_fit)))
    return PolicyFit(fit, [fit.num_fit, *(count(load.seed + i).num_fit for i in range(1, num_draws))])


def _sim_config(
    model: PlannedModel, config: EngineConfig, memory: MemoryPlan, limits: SchedulerConfig, hardware: Device
) -> SimConfig:
    """The planned engine."""
    shape = planned_shape(model, memory, config.device_type)
    copy_seconds = block_copy_seconds(memory.kv_pool.block_size, shape, hardware)
    return SimConfig(limits, memory.kv_pool, model=shape, block_copy_seconds=copy_seconds)


def planned_shape(model: PlannedModel, memory: MemoryPlan, device_type: str) -> ModelShape:
    """The shape of a planned model, with the bytes per weight and per KV value of the planned data types."""
    num_weights = sum(matrix.num_weights for matrix in model.config.read_matrices)
    read_bytes = step_weight_bytes(model.config, memory.choice.memory(device_type), model.formats)
    kv_value_bytes = memory.token_bytes / model.config.kv_values_per_token
    return ModelShape(model.name, model.config, read_bytes / num_weights, kv_value_bytes)


def serve_command(model: PlannedModel, config: EngineConfig, memory: MemoryPlan) -> str:
    """The command that starts an engine with exactly the planned blocks."""
    limits, num_loras = config.scheduler_config(memory.max_model_len), config.num_loras
    kv_cache_dtype = memory.choice.kv_cache_dtype
    options: dict[str, object] = {
        "device": config.device,
        "dtype": memory.choice.dtype,
        "kernels": memory.choice.kernels,
        "kv-cache-dtype": kv_cache_dtype if kv_cache_dtype in KV_CACHE_DTYPES else "auto",
        "max-model-len": memory.max_model_len,
        "block-size": config.block_size,
        "num-kv-blocks": memory.pool.num_blocks,
        "max-num-seqs": config.max_num_seqs,
        "batching": config.batching,
        "kv": config.kv,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "quantization": config.quantization,
        "kv-arena": config.kv_arena if reserves(config.kv) else None,
        "static-batch-size": limits.static_batch_size if config.batching == "static" else None,
        "max-loras": num_loras or None,
        "max-lora-rank": config.max_lora_rank if num_loras else None,
        "preemption-mode": "swap" if config.preemption_mode == "swap" else None,
        "swap-space": config.swap_space,
    }
    words = [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    if config.speculative is not None:
        chosen = {name: value for name, value in asdict(config.speculative).items() if value is not None}
        words += ["--speculative-config", json.dumps(chosen)]
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
    if choice.kernels == "native":
        notes += fallback_notes(model.config)
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
