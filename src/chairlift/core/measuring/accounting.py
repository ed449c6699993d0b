"""Accounting of KV memory in slots, after every `schedule()` (Kwon et al., SOSP'23, section 3.1).

Each physical slot is of exactly one kind, so the five kinds add up to the pool:

    |---------------------------- held by requests ----------------------------|---------- not held ----------|
    | token states | reserved       | internal fragmentation   | external fragmentation  | free             |
      written, for   will be written  never written, or its      lost to the allocator's   available
      an unfinished  by its request   request has finished       rounding, or free while
      request                                                    the queue waits for memory
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from chairlift.core.kv.block_tables import held_blocks
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.kv_groups import FULL
from chairlift.request import Request, WaitReason

SHORT_OF_MEMORY = frozenset({WaitReason.MEMORY, WaitReason.PREEMPTION})


class SlotUsage(NamedTuple):
    """Slots by kind. `shared` slots are held by several requests; without sharing, `saved` more would be held.

    The split between `reserved` and `internal` goes by `max_tokens`: a request may finish earlier, and then some of its
    `reserved` slots were internal fragmentation.
    """

    token_states: int
    reserved: int
    internal: int
    external: int
    free: int
    shared: int
    saved: int


def slot_usage(running: Collection[Request], kv: KVCacheManager, wait_reason: WaitReason | None) -> SlotUsage:
    """The pool's slots by kind. Only full, computed blocks are shared, so a shared slot is a token state of each of its
    requests. It is counted once by subtracting the duplicate table entries.

    Args:
        running: all requests that hold memory; the finished ones among them hold it until their batch completes.
        wait_reason: why the head of the queue is not in the step; None if the queue is empty.
    """
    if not kv.num_blocks:
        return SlotUsage(0, 0, 0, 0, 0, 0, 0)
    block_size = kv.block_size
    has_groups = kv.windows != FULL
    in_tables = written = reserved = finished = 0
    for request in running:
        num_slots = kv.num_held_slots(request) if has_groups else request.num_slots
        in_tables += num_slots
        if request.finish_reason is not None:
            finished += num_slots
            continue
        computed, last = request.num_computed_tokens, request.max_total_tokens - 1
        if has_groups:
            written += num_written_slots(request, kv)
            ends = (min(len(table) * block_size, last) for table in kv.block_tables(request))
            reserved += sum(end - computed for end in ends if end > computed)
            continue
        written += computed
        end = min(num_slots, last)
        if end > computed:
            reserved += end - computed
    num_free = kv.num_free_blocks * block_size
    counts = kv.counts()
    rounding = counts.num_rounding_blocks * block_size
    held = kv.num_blocks * block_size - num_free - rounding
    saved = duplicates = in_tables - held
    if saved and finished:
        tables = [held_blocks(kv.block_tables(request)) for request in running if request.finish_reason is None]
        duplicates = (sum(map(len, tables)) - len(set().union(*tables))) * block_size
    token_states = written - duplicates
    unusable = num_free if wait_reason in SHORT_OF_MEMORY else 0
    return SlotUsage(
        token_states=token_states,
        reserved=reserved,
        internal=held - token_states - reserved,
        external=rounding + unusable,
        free=num_free - unusable,
        shared=counts.num_shared_blocks * block_size,
        saved=saved,
    )


def num_written_slots(request: Request, kv: KVCacheManager) -> int:
    """The number of slots with K and V that the request holds, in all groups of layers."""
    return request.num_computed_tokens * len(kv.windows) - kv.num_released_slots(request)
