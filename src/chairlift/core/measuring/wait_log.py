"""Records why requests wait: an event when the reason changes, and the number of steps for each reason."""

from __future__ import annotations

from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand
from chairlift.core.measuring.request_meter import RequestMeter
from chairlift.events import EventSink, RequestWaiting
from chairlift.request import Request, RequestStatus, WaitReason


class WaitLog:
    """Counts, for each waiting request, the steps that it waited, by reason.

    All requests in the queue wait for the reason that blocks the head of the queue. Under fair sharing that holds for
    requests of the head's tenant; the others wait for FAIRNESS. So one counter per reason and tenant is enough: a
    request stores the counters when it starts to wait, and adds the differences when it stops.

    Attributes:
        num_steps: the number of planned steps.
    """

    def __init__(self, kv_cache_manager: KVCacheManager, events: EventSink | None, is_fair: bool = False) -> None:
        self._kv = kv_cache_manager
        self._events = events
        self._is_fair = is_fair
        self._steps_by_tenant: dict[str, dict[str, int]] = {}
        self._num_queue_steps = 0
        self.num_steps = 0
        self._last_head: Request | None = None

    def count_step(self, reason: WaitReason | None, head: Request | None) -> None:
        """Count a planned step, after admitted requests have left the queue and before released siblings join it.

        `reason` is why `head`, the head of the queue, is not in the step; None if the queue is empty.
        """
        self.num_steps += 1
        if reason is not None and head is not None:
            self._num_queue_steps += 1
            steps = self._steps_by_tenant.setdefault(head.tenant if self._is_fair else "", {})
            steps[reason.value] = steps.get(reason.value, 0) + 1

    def _counters(self, request: Request, is_parked: bool) -> dict[str, int]:
        """Steps by reason that the request would have waited if it had always been parked, or always in the queue."""
        if is_parked:
            return {WaitReason.SIBLING_PREFILL.value: self.num_steps}
        counters = dict(self._steps_by_tenant.get(request.tenant if self._is_fair else "", ()))
        if self._is_fair:
            counters[WaitReason.FAIRNESS.value] = self._num_queue_steps - sum(counters.values())
        return counters

    def record_head(
        self, head: Request, reason: WaitReason, now: float, num_running: int, demand: MemoryDemand | None = None
    ) -> None:
        """Record why the head of the queue is blocked. A previous head of another tenant now waits for FAIRNESS."""
        last, self._last_head = self._last_head, head
        if self._is_fair and last is not None and last is not head and last.status is RequestStatus.WAITING:
            self.record_reason(last, WaitReason.FAIRNESS, now, num_running)
        self.record_reason(head, reason, now, num_running, demand)

    def record_reason(
        self, request: Request, reason: WaitReason, now: float, num_running: int, demand: MemoryDemand | None = None
    ) -> None:
        """Emit an event if the reason has changed. `demand` is what admission would take now, if None. It is computed
        only for an event, because it hashes the prompt."""
        if request.meter.wait_reason is reason:
            return
        request.meter.wait_reason = reason
        if self._events is not None:
            blocks = demand or self._kv.demand(request)
            request_id = request.request_id
            self._events.emit(RequestWaiting(now, request_id, reason.value, *blocks, num_running, self.num_steps))

    def start(self, request: Request) -> None:
        """Start to count for a request that has been parked, or joins the queue."""
        request.meter.wait_mark = self._counters(request, request.status is RequestStatus.PARKED)

    def stop(self, request: Request) -> None:
        """Add the steps that were counted since `start`."""
        meter: RequestMeter = request.meter
        mark = meter.wait_mark or {}
        is_parked = WaitReason.SIBLING_PREFILL.value in mark
        for reason, count in self._counters(request, is_parked).items():
            if num_steps := count - mark.get(reason, 0):
                meter.steps_waited[reason] = meter.steps_waited.get(reason, 0) + num_steps
        meter.wait_reason = None
