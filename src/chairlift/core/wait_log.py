"""Why requests wait: told when the reason changes, and counted in steps."""

from __future__ import annotations

from chairlift.core import step_plan
from chairlift.core.kv_cache_manager import KVCacheManager, MemoryDemand
from chairlift.events import EventSink, RequestQueued
from chairlift.request import Request, RequestStatus, WaitReason


class WaitLog:
    """Every step that leaves somebody in the queue counts for the reason for which its head was refused, and everybody
    behind the head waits for that reason too; but those of other tenants than the head's, if there are tenants in turn,
    wait for fairness. So one count a reason and turn is kept; a request notes the counts when it joins, and takes the
    differences when it leaves.

    Args:
        has_turns: the policy serves tenants in turn.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, events: EventSink | None, has_turns: bool = False) -> None:
        self._kv = kv_cache_manager
        self._events = events
        self._has_turns = has_turns
        self._queue_steps: dict[str, dict[str, int]] = {}
        self._num_queue_steps = 0
        self._num_steps = 0
        self._last_head: Request | None = None

    def count_step(self, reason: WaitReason | None, head: Request | None) -> None:
        """A step is planned; `reason` is why the head of the queue is not in it, None if nobody waits.

        Whoever joined the step has left by now, and whoever may queue because of it has not joined yet.
        """
        self._num_steps += 1
        if reason is not None and head is not None:
            self._num_queue_steps += 1
            steps = self._queue_steps.setdefault(self._turn(head), {})
            steps[reason.value] = steps.get(reason.value, 0) + 1

    def _turn(self, request: Request) -> str:
        return request.tenant if self._has_turns else ""

    def _counts(self, request: Request) -> dict[str, int]:
        """Steps so far that left the request in the queue, had it always been there, by reason."""
        counts = dict(self._queue_steps.get(self._turn(request), ()))
        if self._has_turns:
            counts[WaitReason.FAIRNESS.value] = self._num_queue_steps - sum(counts.values())
        return counts

    def note_head(
        self, head: Request, reason: WaitReason, now: float, num_running: int, demand: MemoryDemand | None = None
    ) -> None:
        """The head of the queue is refused; if it took the turn of another tenant's request, that waits for it now."""
        last, self._last_head = self._last_head, head
        if self._has_turns and last is not None and last is not head and last.status is RequestStatus.WAITING:
            self.note(last, WaitReason.FAIRNESS, now, num_running)
        self.note(head, reason, now, num_running, demand)

    def note(
        self, request: Request, reason: WaitReason, now: float, num_running: int, demand: MemoryDemand | None = None
    ) -> None:
        """Tell why a request waits, if that is new; `demand` is what admitting it would take now, if None."""
        if request.wait_reason is reason:
            return
        request.wait_reason = reason
        if self._events is not None:
            demand = demand or self._kv.demand(request)
            self._events.emit(step_plan.waiting(request, reason, demand, num_running, now, self._num_steps))

    def park(self, request: Request) -> None:
        """The request waits outside of the queue."""
        request.wait_mark = {WaitReason.SIBLING_PREFILL.value: self._num_steps}

    def unpark(self, request: Request) -> None:
        """The request waits there no more."""
        self._add(request, {WaitReason.SIBLING_PREFILL.value: self._num_steps})

    def release(self, request: Request, now: float) -> None:
        """The parked request is about to join the queue."""
        self.unpark(request)
        if self._events is not None:
            self._events.emit(RequestQueued(now, request.request_id, self._num_steps))

    def join(self, request: Request) -> None:
        """The request waits in the queue."""
        request.wait_mark = self._counts(request)

    def leave(self, request: Request) -> None:
        """The request is admitted, or gone."""
        request.wait_reason = None
        self._add(request, self._counts(request))

    @staticmethod
    def _add(request: Request, counts: dict[str, int]) -> None:
        for reason, count in counts.items():
            if num_steps := count - request.wait_mark.get(reason, 0):
                request.steps_waited[reason] = request.steps_waited.get(reason, 0) + num_steps
