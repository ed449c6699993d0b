"""The log lines that describe an engine at its start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.core.baselines.selection import KVPool
from chairlift.core.kv.kv_cache_manager import FULL
from chairlift.engine.startup.loaded_model import LoadedModel
from chairlift.engine.startup.pool_capacity import RequestLengths, compute_pool_capacity
from chairlift.kernels.kernel_memory import MemoryItem, total
from chairlift.sampling_params import SamplingDefaults
from chairlift.worker.kv_cache_plan import KVCachePlan
from chairlift.worker.memory import format_memory

TYPICAL: Final = RequestLengths(256, 256, 256)
"""The request whose number in the pool is logged at startup, in addition to requests of full length."""


def describe_memory(
    pool: KVPool,
    limits: SchedulerConfig,
    plan: KVCachePlan,
    loaded: LoadedModel,
    activations: Sequence[MemoryItem],
) -> list[str]:
    """The lines about the memory and the capacity of an engine.

    Args:
        limits: the configuration of its scheduler.
        pool, plan: its KV pool.
        activations: the planned memory of a step.
    """
    half = limits.max_model_len // 2
    typical = RequestLengths(min(TYPICAL.prompt, half), min(TYPICAL.output, half), min(TYPICAL.max_tokens, half))
    longest = RequestLengths(limits.max_model_len - 1, 1, 1)
    counts = [compute_pool_capacity(pool, limits, repeat(lengths)).num_fit for lengths in (longest, typical)]
    is_static = limits.batching == "static"
    batch = f"static_batch_size={limits.static_batch_size}" if is_static else f"max_num_seqs={limits.max_num_seqs}"
    return [
        *_states(plan),
        f"KV pool: {plan.num_blocks} blocks of {plan.block_size} slots = {_pool_content(plan)} in "
        f"{format_memory(plan.kv_bytes)}; max_model_len={limits.max_model_len}, max_num_seqs={limits.max_num_seqs}, "
        f"max_num_batched_tokens={limits.max_num_batched_tokens}",
        *_swap_space(plan),
        f"weights: {format_memory(total(loaded.planned_weights))}; activations of a step: at most "
        f"{format_memory(total(activations))}",
        f"kv={pool.name}: the pool holds {counts[0]} concurrent requests of max_model_len tokens, or {counts[1]} of "
        f"{typical.prompt} prompt and {typical.output} output tokens; {batch}",
    ]


def _states(plan: KVCachePlan) -> list[str]:
    """The line about recurrent states, if the model has them."""
    if not plan.state_bytes:
        return []
    drafts = f", {plan.num_draft_states} draft tokens" if plan.num_draft_states else ""
    return [
        f"recurrent states: {format_memory(plan.state_bytes)} for each of {plan.num_states} requests{drafts} and "
        f"{plan.num_checkpoints} checkpoints, in {format_memory(plan.num_state_slots * plan.state_bytes)}; a long "
        f"sequence has a checkpoint every {plan.checkpoint_interval} tokens"
    ]


def _swap_space(plan: KVCachePlan) -> list[str]:
    if not plan.num_swap_blocks:
        return []
    return [f"swap space: {plan.num_swap_blocks} blocks for preempted requests in {format_memory(plan.swap_bytes)}"]


def _pool_content(plan: KVCachePlan) -> str:
    if plan.windows == FULL:
        return f"{plan.num_slots} tokens"
    sizes = Counter("all tokens" if window is None else f"a window of {window}" for window in plan.windows)
    groups = ", ".join(f"{count} x {size}" for size, count in sizes.items())
    return f"{plan.num_slots} slots for {len(plan.windows)} groups of layers ({groups})"


def describe_sampling(defaults: SamplingDefaults) -> list[str]:
    """The line about the sampling parameters that the files of a model set, if there are any."""
    shown = ", ".join(f"{name}={value}" for name, value in defaults.values().items())
    return [f"default sampling parameters of this model: {shown} (see --generation-config)"] if shown else []


def describe_draft(draft: LoadedModel, kv_bytes: int) -> str:
    """The line about the memory of a draft model, whose K, V and states take `kv_bytes` of the pool."""
    return (
        f"draft model {draft.name}: weights {format_memory(total(draft.planned_weights))}; its K, V and states take "
        f"{format_memory(kv_bytes)} of the pool"
    )
