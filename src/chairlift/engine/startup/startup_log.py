"""The log lines that describe an engine at its start."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import repeat
from typing import Final

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.core.kv.kv_groups import FULL
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup.activation_plan import plan_activations
from chairlift.engine.startup.loaded_model import LoadedDecoder
from chairlift.engine.startup.pool_capacity import RequestLengths, compute_pool_capacity
from chairlift.engine.startup.token_budget import describe_chunks, describe_rows
from chairlift.events import Event, StepTimeChanged
from chairlift.kernels.kernel_memory import total
from chairlift.step_time import StepTime
from chairlift.system.memory_amounts import format_memory

logger = logging.getLogger("chairlift")

TYPICAL: Final = RequestLengths(256, 256, 256)
"""The request whose number in the pool is logged at startup, in addition to requests of full length."""


def describe_decoder(
    pool: KVPool,
    limits: SchedulerConfig,
    plan: KVCachePlan,
    loaded: LoadedDecoder,
    draft: LoadedDecoder | None,
    draft_slot_bytes: int,
) -> list[str]:
    """The lines about the memory, the capacity and the measured times of the engine of a decoder.

    Args:
        limits: the configuration of its scheduler.
        pool, plan: its KV pool.
        draft: its draft model, if there is one, whose K and V take `draft_slot_bytes` of each slot.
    """
    memory = loaded.choice.memory(loaded.device.type)
    activations = plan_activations(loaded.config, memory, limits, plan.block_size, loaded.kv_layout)
    lines = _describe_pool(plan, limits, loaded.engine_config.kv_cache_memory_bytes)
    lines.append(
        f"weights: {format_memory(total(loaded.planned_weights))}; activations of a step: at most "
        f"{format_memory(total(activations))}"
    )
    lines.append(_describe_capacity(pool, limits))
    if shown := ", ".join(f"{name}={value}" for name, value in loaded.sampling_defaults.values().items()):
        lines.append(f"default sampling parameters of this model: {shown} (see --generation-config)")
    if limits.step_time is not None:
        lines.append(describe_chunks(limits.step_time, limits.max_num_batched_tokens, limits.max_model_len))
    if limits.row_time is not None:
        lines.append(describe_rows("speculative decoding", limits.row_time))
    if draft is not None:
        states = (plan.num_states + plan.num_draft_states) * plan.draft_model_state_bytes
        lines.append(
            f"draft model {draft.name}: weights {format_memory(total(draft.planned_weights))}; its K, V and states "
            f"take {format_memory(plan.num_slots * draft_slot_bytes + states)} of the pool"
        )
    if limits.draft_row_time is not None:
        lines.append(describe_rows("predictor" if draft is None else "draft model", limits.draft_row_time))
    return lines


class StepTimeLog:
    """An event sink that logs the sizes of chunks when the estimated time of steps has become shorter.

    Args:
        limits: the configuration of the scheduler.
    """

    def __init__(self, limits: SchedulerConfig) -> None:
        self._limits = limits

    def emit(self, event: Event) -> None:
        if isinstance(event, StepTimeChanged):
            limits = self._limits.max_num_batched_tokens, self._limits.max_model_len
            logger.info("steps are faster than estimated: %s", describe_chunks(StepTime(**event.step_time), *limits))


def _describe_pool(plan: KVCachePlan, limits: SchedulerConfig, budget: int | None) -> list[str]:
    """The lines about recurrent states, the blocks of K and V, and the swap space, as far as there are any.

    Args:
        budget: bytes of `kv_cache_memory_bytes`, if it is set.
    """
    lines = []
    if budget is not None and plan.limited_by == "demand":
        lines.append(
            f"kv_cache_memory_bytes={format_memory(budget)} exceeds the {format_memory(plan.num_bytes)} that "
            f"max_num_seqs={limits.max_num_seqs} requests of max_model_len={limits.max_model_len} tokens need: the "
            "rest stays free"
        )
    if plan.state_bytes:
        drafts = f", {plan.num_draft_states} draft tokens" if plan.num_draft_states else ""
        lines.append(
            f"recurrent states: {format_memory(plan.state_bytes)} for each of {plan.num_states} requests{drafts} and "
            f"{plan.num_checkpoints} checkpoints, in {format_memory(plan.num_state_slots * plan.state_bytes)}; a long "
            f"sequence has a checkpoint every {plan.checkpoint_interval} tokens"
        )
    content = f"{plan.num_slots} tokens"
    if plan.windows != FULL:
        sizes = Counter("all tokens" if window is None else f"a window of {window}" for window in plan.windows)
        groups = ", ".join(f"{count} x {size}" for size, count in sizes.items())
        content = f"{plan.num_slots} slots for {len(plan.windows)} groups of layers ({groups})"
    lines.append(
        f"KV pool: {plan.num_blocks} blocks of {plan.block_size} slots = {content} in {format_memory(plan.kv_bytes)}; "
        f"max_model_len={limits.max_model_len}, max_num_seqs={limits.max_num_seqs}, "
        f"max_num_batched_tokens={limits.max_num_batched_tokens}"
    )
    if plan.num_swap_blocks:
        size = format_memory(plan.swap_bytes)
        lines.append(f"swap space: {plan.num_swap_blocks} blocks for preempted requests in {size}")
    return lines


def _describe_capacity(pool: KVPool, limits: SchedulerConfig) -> str:
    half = limits.max_model_len // 2
    typical = RequestLengths(min(TYPICAL.prompt, half), min(TYPICAL.output, half), min(TYPICAL.max_tokens, half))
    longest = RequestLengths(limits.max_model_len - 1, 1, 1)
    counts = [compute_pool_capacity(pool, limits, repeat(lengths)).num_fit for lengths in (longest, typical)]
    is_static = limits.batching == "static"
    batch = f"static_batch_size={limits.static_batch_size}" if is_static else f"max_num_seqs={limits.max_num_seqs}"
    return (
        f"kv={pool.name}: the pool holds {counts[0]} concurrent requests of max_model_len tokens, or {counts[1]} of "
        f"{typical.prompt} prompt and {typical.output} output tokens; {batch}"
    )
