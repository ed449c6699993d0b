"""Seats that the scheduling policy takes from running requests for the head of the queue.

    seats:  [ a b c ]   queue: [ d e ]     srpt: d has less work left than c  ->  seats: [ a b d ]   queue: [ e c ]

Memory is not taken in this way: the preempted request keeps its blocks in the prefix cache, as long as no other request
needs them, and then it recomputes little. One seat is taken per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.request import Request


def find_displacing_head(
    queue: RequestQueue, running: Sequence[Request], kv: KVCacheManager, max_num_seqs: int
) -> Request | None:
    """The head of the queue if it takes the seat of the last running request; None if it does not, if a seat is free
    or becomes free with the next result, or if it could not be admitted with one seat."""
    if len(running) < max_num_seqs or not kv.can_preempt or (head := queue.peek()) is None:
        return None
    if head.sampling_params.use_beam_search and head.sampling_params.n > 1:
        return None
    last = running[-1]
    if head.num_pending_tokens or last.num_tokens == last.end_total_tokens or not queue.displaces(head, last):
        return None
    demand = kv.demand(head)
    return head if demand.needed <= demand.free else None
