"""What planner and engine must agree on: the pool, the longest request, and what an engine says of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Final

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.baselines.selection import max_request_slots
from chairlift.engine.startup.memory_plan import MemoryItem, StepLimits, plan_activations, plan_weights, total
from chairlift.engine.startup.native_memory_plan import MatrixFormats, plan_native_activations, plan_native_weights
from chairlift.engine.startup.pool_capacity import KVPool, RequestLengths, compute_pool_capacity
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice
from chairlift.models.config import ModelConfig
from chairlift.worker.kv_cache_plan import KVCachePlan, plan_kv_cache
from chairlift.worker.memory import format_memory

TYPICAL: Final = RequestLengths(256, 256, 256)
"""What an engine counts at its start, besides requests of full length."""


def plan_pool(config: EngineConfig, slot_bytes: int, context: int, memory_bytes: int) -> KVCachePlan:
    """The pool of `config`: `num_kv_blocks`, or what `kv_cache_memory` holds, or else `memory_bytes`.

    Args:
        slot_bytes: K and V of one token, over all layers; context: tokens that the model can reach at most.

    Raises:
        ConfigError: as `plan_kv_cache`.
    """
    if config.num_kv_blocks is not None:
        return KVCachePlan(config.num_kv_blocks, config.block_size, slot_bytes * config.block_size, "num_kv_blocks")
    return plan_kv_cache(
        slot_bytes=slot_bytes,
        context=context,
        block_size=config.block_size,
        memory_bytes=config.kv_cache_memory or memory_bytes,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        rounded=int if config.kv == "paged" else ARENAS[config.kv_arena](1).rounded_size,
    )


def resolve_max_model_len(config: EngineConfig, context: int, num_blocks: int, max_slots: int) -> int:
    """The smaller of the model's context and what the pool can give to one request, unless asked for less.

    Args:
        max_slots: of `max_request_slots`.

    Raises:
        ConfigError: more is asked for.
    """
    if config.max_model_len is None:
        return min(context, max_slots)
    if config.max_model_len > context:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's context of {context} tokens")
    if config.max_model_len > max_slots:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {max_slots} slots that the KV pool of "
            f"{num_blocks} blocks x {config.block_size} can give to one request under kv={config.kv}: lower the "
            "one or enlarge the other"
        )
    return config.max_model_len


def planned_pool(config: EngineConfig, context: int, num_blocks: int) -> KVPool:
    """The pool under the policy of `config`; raises ConfigError as `resolve_max_model_len`."""
    slots = max_request_slots(config.kv, num_blocks=num_blocks, block_size=config.block_size, arena=config.kv_arena)
    max_model_len = resolve_max_model_len(config, context, num_blocks, slots)
    return KVPool(num_blocks, config.block_size, max_model_len, config.kv, config.kv_arena)


def planned_weights(
    model_config: ModelConfig, choice: KernelChoice, device: str, formats: MatrixFormats
) -> list[MemoryItem]:
    """What a loaded model will hold.

    Args:
        device: "cpu" or "cuda".
        formats: of the model's file, see `loading.resolve.matrix_formats`.
    """
    if choice.kernels == "native":
        return plan_native_weights(model_config, formats, choice.quantization)
    return plan_weights(model_config, choice.dtype, device, choice.kernels)


def planned_activations(
    model_config: ModelConfig, choice: KernelChoice, device: str, limits: StepLimits
) -> list[MemoryItem]:
    """What the largest step will need at most, besides weights, K and V."""
    if choice.kernels == "native":
        return plan_native_activations(model_config, limits)
    return plan_activations(model_config, limits, choice.dtype, device)


def startup_summary(
    config: EngineConfig,
    limits: SchedulerConfig,
    plan: KVCachePlan,
    *,
    weights: Sequence[MemoryItem],
    activations: Sequence[MemoryItem],
    held_bytes: int,
) -> list[str]:
    """The plan beside what an engine got, for its log.

    Args:
        config: of the engine; limits: its scheduler's; plan: its pool.
        weights, activations: as planned; held_bytes: of weights, that its model really holds.
    """
    pool = KVPool(plan.num_blocks, plan.block_size, limits.max_model_len, config.kv, config.kv_arena)
    half = limits.max_model_len // 2
    typical = RequestLengths(min(TYPICAL.prompt, half), min(TYPICAL.output, half), min(TYPICAL.max_tokens, half))
    longest = RequestLengths(limits.max_model_len - 1, 1, 1)
    counts = [compute_pool_capacity(pool, limits, repeat(lengths)).num_fit for lengths in (longest, typical)]
    is_static = limits.batching == "static"
    seats = f"static batches of {limits.static_batch_size}" if is_static else f"seats for {limits.max_num_seqs}"
    return [
        f"weights: {format_memory(total(weights))} planned, {format_memory(held_bytes)} held; activations of a step: "
        f"up to {format_memory(total(activations))} planned",
        f"kv={pool.name}: memory for {counts[0]} requests of max_model_len at once, or {counts[1]} of {typical.prompt} "
        f"prompt and {typical.output} output tokens; {seats}",
    ]
