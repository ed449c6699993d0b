"""Where the KV memory goes, in slots (after Kwon et al., SOSP'23, section 3.1).

Each physical slot is of one kind, so the five always add up to the pool:

    |------------------------------ held ------------------------------|---------- in nobody's hands ----------|
    | token states | reserved       | internal       | external        | external           | free              |
      written, for   will be written  never will be,   lost to the       while the head of    otherwise
      an unfinished  by its holder    or its holder    allocator's       the queue is
      request                         has ended        rounding          refused for memory
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.core.kv_cache_manager import KVCacheManager
from chairlift.request import Request, WaitReason

REFUSED_FOR_MEMORY = frozenset({WaitReason.MEMORY, WaitReason.PREEMPTION})


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Slots by kind. `shared` ones are held by several requests, which would hold `saved` more, had each its own.

    What a request will yet write goes by its `max_tokens`: it may end before, and then some of `reserved` was internal.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int
    saved: int


def account(running: Sequence[Request], kv: KVCacheManager, wait_reason: WaitReason | None) -> MemoryUse:
    """The kinds after a schedule.

    Only whole written blocks are shared, so a slot that several hold is a token state of each, and is counted once by
    taking away what the tables name twice.

    Args:
        running: all who hold memory; those that have ended hold it for their batch alone.
        wait_reason: why the head of the queue is not in the step; None if nobody waits.
    """
    block_size = kv.block_size
    named = written = reserved = ended = 0
    for request in running:
        num_slots = request.num_slots
        named += num_slots
        if request.finish_reason is not None:
            ended += num_slots
            continue
        computed = request.num_computed_tokens
        written += computed
        end = min(num_slots, request.max_total_tokens - 1)
        if end > computed:
            reserved += end - computed
    num_free = kv.num_free_blocks * block_size
    rounding = kv.num_rounding_blocks * block_size
    held = kv.num_blocks * block_size - num_free - rounding
    saved = named - held
    twice = saved
    if saved and ended:
        twice = kv.num_duplicate_blocks(r for r in running if r.finish_reason is None) * block_size
    token_states = written - twice
    lost = num_free if wait_reason in REFUSED_FOR_MEMORY else 0
    return MemoryUse(
        token_states=token_states,
        reserved=reserved,
        internal=held - token_states - reserved,
        external=rounding + lost,
        free=num_free - lost,
        shared=kv.num_shared_blocks * block_size,
        saved=saved,
    )
