"""Decisions that the engine and `chairlift plan` share: the KV pool, the longest request, and the startup summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Final

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.baselines.selection import KVPool
from chairlift.core.kv.kv_groups import FULL, KVGroups
from chairlift.engine.startup.memory_plan import (
    DTYPE_BYTES,
    MemoryItem,
    plan_activations,
    plan_lora,
    plan_weights,
    total,
)
from chairlift.engine.startup.native_memory_plan import MatrixFormats, plan_native_activations, plan_native_weights
from chairlift.engine.startup.pool_capacity import RequestLengths, compute_pool_capacity
from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice
from chairlift.models.declaration import ModelConfig
from chairlift.models.kv_layout import KVLayout
from chairlift.worker.kv_cache_plan import SPARE_BLOCKS, KVCachePlan
from chairlift.worker.memory import format_memory

ENCODER_TOKENS: Final = 2048

TYPICAL: Final = RequestLengths(256, 256, 256)
"""The request whose number in the pool is logged at startup, in addition to requests of full length."""


def encoder_token_budget(config: EngineConfig, max_model_len: int) -> int:
    """The token budget of a step of an encoder, which computes each text in one step. More tokens are not faster."""
    return config.max_num_batched_tokens or max(ENCODER_TOKENS, max_model_len, config.max_num_seqs)


def plan_layout(config: EngineConfig, model_config: ModelConfig) -> KVLayout:
    """The groups of layers that have block tables of their own.

    Reservations have one group, because they never release a slot before their request has finished. The groups do not
    depend on `max_model_len`, so a number of blocks is the same memory whatever its value is.
    """
    if config.kv != "paged" or config.disable_hybrid_kv_cache_manager:
        return KVLayout.one_group(model_config.num_layers)
    return KVLayout.by_window(model_config, model_config.max_position_embeddings)


def plan_pool(
    config: EngineConfig,
    slot_bytes: int,
    context: int,
    memory_bytes: int,
    windows: tuple[int | None, ...] = FULL,
) -> KVCachePlan:
    """Plan the pool: `num_kv_blocks`, or the blocks that fit in `kv_cache_memory_bytes`, or else in `memory_bytes`, but
    no more than `max_num_seqs` sequences of full length can use.

    Args:
        slot_bytes: bytes of K and V of one token in the layers of one group.
        context: the model's maximum number of tokens.
        windows: the window of each group of layers.

    Raises:
        ConfigError: the budget does not hold one sequence of `max_model_len` tokens; or one block, if `max_model_len`
            is None, because the caller then lowers it to the size of the pool.
    """
    block_size, max_model_len = config.block_size, config.max_model_len
    block_bytes = slot_bytes * block_size
    if config.num_kv_blocks is not None:
        return KVCachePlan(config.num_kv_blocks, block_size, block_bytes, "num_kv_blocks", windows)
    rounded = int if config.kv == "paged" else ARENAS[config.kv_arena](1).rounded_size
    groups = KVGroups(windows, block_size, config.largest_token_budget)
    memory_bytes = config.kv_cache_memory_bytes or memory_bytes
    affordable = max(0, memory_bytes // block_bytes - SPARE_BLOCKS)
    blocks_per_seq = rounded(sum(groups.most_blocks(max_model_len or context)))
    needed = len(windows) if max_model_len is None else blocks_per_seq
    if affordable >= needed:
        usable = config.max_num_seqs * blocks_per_seq
        limited_by = "memory" if affordable < usable else "demand"
        return KVCachePlan(min(affordable, usable), block_size, block_bytes, limited_by, windows)
    spare = f"and {SPARE_BLOCKS} spare block, each of {block_size} slots and {format_memory(block_bytes)}"
    budget = f"the KV memory budget of {format_memory(memory_bytes)} holds {affordable} blocks ({spare})"
    required = f"set kv_cache_memory_bytes to at least {format_memory((needed + SPARE_BLOCKS) * block_bytes)}"
    if max_model_len is None or not affordable:
        raise ConfigError(f"{budget}, but {needed} are needed: {required}, or lower block_size")
    whole = next((blocks for blocks in range(affordable, 0, -1) if rounded(blocks) <= affordable), 0)
    longest = groups.max_tokens(whole, max_model_len)
    raise ConfigError(
        f"{budget}, at most {longest} tokens for one request, but max_model_len={max_model_len} needs {needed} blocks: "
        f"{required}, or max_model_len to at most {longest}"
    )


def planned_pool(config: EngineConfig, context: int, num_blocks: int, windows: tuple[int | None, ...] = FULL) -> KVPool:
    """The pool with the policy of `config`. The default of `max_model_len` is the smaller of the model's context and
    the slots that one request can hold.

    Raises:
        ConfigError: `max_model_len` exceeds one of them.
    """
    pool = KVPool(
        num_blocks,
        config.block_size,
        config.max_model_len or context,
        config.kv,
        config.kv_arena,
        windows,
        config.largest_token_budget,
    )
    max_slots = pool.max_request_slots
    if max_slots < 2:
        groups = KVGroups(windows, config.block_size, config.largest_token_budget)
        raise ConfigError(
            f"the KV pool of {num_blocks} blocks x {config.block_size} slots is too small for one request, because "
            f"each of {len(windows)} groups of layers needs blocks of its own: set num_kv_blocks to at least "
            f"{sum(groups.most_blocks(2))}"
        )
    if config.max_model_len is None:
        return replace(pool, max_model_len=min(context, max_slots))
    if config.max_model_len > context:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's context of {context} tokens")
    if config.max_model_len > max_slots:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {max_slots} tokens of one request that the KV pool of "
            f"{num_blocks} blocks x {config.block_size} can hold under kv={config.kv}{_groups_note(windows)}: lower "
            "max_model_len, or enlarge the pool"
        )
    return pool


def _groups_note(windows: tuple[int | None, ...]) -> str:
    if windows == FULL:
        return ""
    return (
        f", because each of {len(windows)} groups of layers needs blocks of its own, and those with a window also "
        "blocks for max_num_batched_tokens tokens"
    )


def planned_weights(
    model_config: ModelConfig, choice: KernelChoice, device: str, formats: MatrixFormats, config: EngineConfig
) -> list[MemoryItem]:
    """The planned memory of a loaded model's weights and of its LoRA adapters.

    Args:
        device: "cpu" or "cuda".
        formats: the formats of the matrices in the model's file, see `loading.resolve.matrix_formats`.
    """
    lora = plan_lora(model_config, config.num_loras, config.max_lora_rank, DTYPE_BYTES[choice.dtype])
    if choice.kernels == "native":
        return plan_native_weights(model_config, formats, choice.quantization) + lora
    return plan_weights(model_config, choice.dtype, device, choice.kernels) + lora


def planned_activations(
    model_config: ModelConfig,
    choice: KernelChoice,
    device: str,
    limits: SchedulerConfig,
    block_size: int,
    layout: KVLayout | None = None,
) -> list[MemoryItem]:
    """An upper bound of the memory that the largest step needs in addition to weights, K and V.

    Args:
        layout: the groups of layers with block tables of their own; None for one group.
    """
    if choice.kernels == "native":
        return plan_native_activations(model_config, limits, block_size, 1 if layout is None else len(layout.windows))
    return plan_activations(model_config, limits, block_size, choice.dtype, device, layout)


def startup_summary(
    config: EngineConfig,
    limits: SchedulerConfig,
    plan: KVCachePlan,
    weights: Sequence[MemoryItem],
    activations: Sequence[MemoryItem],
    held_bytes: int,
) -> list[str]:
    """The log lines that describe the memory and the capacity of an engine.

    Args:
        limits: the configuration of its scheduler.
        plan: its KV pool.
        weights, activations: the planned memory.
        held_bytes: bytes of weights that the loaded model holds.
    """
    pool = planned_pool(
        replace(config, max_model_len=limits.max_model_len), limits.max_model_len, plan.num_blocks, plan.windows
    )
    half = limits.max_model_len // 2
    typical = RequestLengths(min(TYPICAL.prompt, half), min(TYPICAL.output, half), min(TYPICAL.max_tokens, half))
    longest = RequestLengths(limits.max_model_len - 1, 1, 1)
    counts = [compute_pool_capacity(pool, limits, repeat(lengths)).num_fit for lengths in (longest, typical)]
    is_static = limits.batching == "static"
    batch = f"static_batch_size={limits.static_batch_size}" if is_static else f"max_num_seqs={limits.max_num_seqs}"
    return [
        f"KV pool: {plan.num_blocks} blocks of {plan.block_size} slots = {_pool_content(plan)} in "
        f"{format_memory(plan.num_bytes)}; max_model_len={limits.max_model_len}, max_num_seqs={limits.max_num_seqs}, "
        f"max_num_batched_tokens={limits.max_num_batched_tokens}",
        f"weights: {format_memory(held_bytes)} (planned: {format_memory(total(weights))}); activations of a step: at "
        f"most {format_memory(total(activations))}",
        f"kv={pool.name}: the pool holds {counts[0]} concurrent requests of max_model_len tokens, or {counts[1]} of "
        f"{typical.prompt} prompt and {typical.output} output tokens; {batch}",
    ]


def _pool_content(plan: KVCachePlan) -> str:
    if plan.windows == FULL:
        return f"{plan.num_slots} tokens"
    sizes = Counter("all tokens" if window is None else f"a window of {window}" for window in plan.windows)
    groups = ", ".join(f"{count} x {size}" for size, count in sizes.items())
    return f"{plan.num_slots} slots for {len(plan.windows)} groups of layers ({groups})"
