"""Backfilling: requests pass a blocked head of the queue, so that it leaves no seat idle that they could use meanwhile.

    seats   [ a b . . . . . . ]    queue  [ H c d ]     H is a beam search that needs all 8 seats, a and b still
            |     ^ c                                   generate 90 and 200 tokens. c ends before: it passes H.

After EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995), with steps as the time: a request passes
if its longest output ends before the running requests, with their longest outputs, leave the seats and the blocks that
the head needs. So the head starts no later, and memory suffices for all of them until then.

Most requests allow much longer outputs than they have. So during the first WINDOW_STEPS steps in which a head lacks
seats, others pass it whatever their length is. Therefore it starts, if no request goes before it by its policy, at most
WINDOW_STEPS steps and the longest remaining length of a running request after it has become the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from chairlift.config import SchedulerConfig
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.request import Request, RequestStatus, WaitReason
from chairlift.step_time import CHUNK_MULTIPLE

WINDOW_STEPS: Final = 256
"""The steps in which requests of any length pass a head that lacks seats."""

MAX_COMPARED: Final = 64
"""In each step so many requests for which there are seats are compared: that of a request which ends in time reads all
running requests."""


class SeatedBatch(Protocol):
    """The running batch, and the queue behind it."""

    waiting: RequestQueue
    running: list[Request]

    @property
    def num_free_seats(self) -> int: ...


class Backfilling:
    """The requests that one step may admit: the heads of the queue, and then those that may pass a blocked head.
    Nothing passes where running requests cannot be preempted: reservations remain first come, first served.

    Args:
        blocked_steps: the number of steps in which a waiting request was a head that lacked seats. It is continued.
    """

    def __init__(
        self, batch: SeatedBatch, config: SchedulerConfig, kv: KVCacheManager, blocked_steps: dict[Request, int]
    ) -> None:
        self._batch, self._kv, self._blocked_steps = batch, kv, blocked_steps
        # A step computes at least so many tokens of prompts, if there are so many.
        self._chunk_tokens = max(1, min(CHUNK_MULTIPLE, config.max_num_batched_tokens - config.max_num_seqs))
        self._blocked: tuple[Request, WaitReason] | None = None

    def candidates(self) -> Iterator[Request]:
        """The requests to admit, in order. Each is admitted, or passed to `block`, before the next one is taken."""
        while self._blocked is None and (head := self._batch.waiting.peek()) is not None:
            yield head
        if self._blocked is not None:
            yield from self._passing(*self._blocked)

    def block(self, request: Request, reason: WaitReason) -> bool:
        """Record that the last candidate is not admitted; returns whether it is the head of the queue."""
        is_head = self._blocked is None
        if is_head:
            self._blocked = request, reason
        return is_head

    def _passing(self, head: Request, reason: WaitReason) -> Iterator[Request]:
        batch, lacks_seats = self._batch, reason is WaitReason.SEATS
        is_open = lacks_seats and head.num_seats > 1 and self._count_step(head) <= WINDOW_STEPS
        if not (self._kv.can_preempt and batch.num_free_seats and (lacks_seats or reason is WaitReason.MEMORY)):
            return
        steps, seen, num_left = self._find_start(head), {head}, MAX_COMPARED
        while num_free := batch.num_free_seats:
            num_uncomputed = sum(max(0, each.num_prompt_tokens - each.num_computed_tokens) for each in batch.running)
            for request in batch.waiting.in_order():  # from the beginning, because an admission may change the order
                if request in seen:
                    continue
                seen.add(request)
                if request.num_seats > num_free:
                    continue
                if (num_left := num_left - 1) < 0:
                    return
                if is_open and batch.waiting.may_delay(request, head):
                    break
                num_steps = -(-(num_uncomputed + request.num_tokens) // self._chunk_tokens) + _max_steps(request)
                if num_steps <= steps and self._has_blocks(num_steps, request):
                    break
            else:
                return
            yield request

    def _count_step(self, head: Request) -> int:
        """Count a step in which the head lacks seats; returns their number."""
        for request in [each for each in self._blocked_steps if each.status is not RequestStatus.WAITING]:
            del self._blocked_steps[request]
        self._blocked_steps[head] = self._blocked_steps.get(head, 0) + 1
        return self._blocked_steps[head]

    def _find_start(self, head: Request) -> int:
        """The number of steps after which the head has its seats and blocks, if all outputs have their longest length.
        Their growth and the sharing of blocks are left out, so it may be later."""
        num_seats = head.num_seats - self._batch.num_free_seats
        num_needed = self._kv.num_admission_blocks(head) if head.group is None else head.group.num_needed_blocks
        num_blocks = num_needed - self._kv.num_free_blocks
        steps = 0
        for request in sorted(self._batch.running, key=_max_steps):
            if num_seats <= 0 and num_blocks <= 0:
                break
            steps = _max_steps(request)
            num_seats -= request.num_seats
            num_blocks -= -(-self._kv.num_held_slots(request) // self._kv.block_size)
        return steps

    def _has_blocks(self, steps: int, request: Request) -> bool:
        """Whether no running request lacks a block during so many steps if this one is admitted and then ends."""
        size, num_free = self._kv.block_size, self._kv.num_free_blocks
        needed = self._kv.worst_case_blocks(request) * request.num_seats
        if needed > num_free:
            return False
        for each in self._batch.running:
            num_new = min(each.num_tokens + steps, each.end_total_tokens) - each.num_slots
            needed += max(0, -(-num_new // size)) * len(self._kv.windows) * each.num_seats
        return needed <= num_free


def _max_steps(request: Request) -> int:
    """The number of tokens that the request may still generate, one in each step after the prompt."""
    return request.end_total_tokens - request.num_tokens
