"""Tracks the requests of a running engine: their state, and what they wait for.

The number of requests in memory is bounded: the last `max_finished` requests that ended are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from chairlift.events import SLOT_KINDS, Event, RequestArrived, Step
from chairlift.observability.queue_timeline import FAIRNESS, UNKNOWN, BlockHolder, QueueInterval, QueueTimeline
from chairlift.observability.replay import SIBLING_PREFILL, Replay, ReplayReader, Rows
from chairlift.observability.step_cost import StepCost
from chairlift.observability.tracked_request import TrackedRequest, Wait, WaitSpan, sum_by_reason
from chairlift.policy_class import is_fair

NEXT_STEP: Final = "next_step"
PRUNE_INTERVAL_STEPS: Final = 256
MAX_TIMELINE_STEPS: Final = 4096
"""Earlier steps of longer waits are summed up by reason."""

MAX_RUNS: Final = 32
"""Longer parts of a wait in the queue are summed up by reason: there the turn alternates between tenants."""


class _WaitRow(NamedTuple):
    """The steps `first` to `end` - 1 of a wait, with one reason and one interval of the queue, if it was in it.

    With `seconds` the steps are as many as had the reason, and took this time, in any order.
    """

    reason: str
    first: int
    end: int
    interval: QueueInterval | None = None
    seconds: float | None = None


class RequestTracker(Replay, ReplayReader):
    """A replay that tracks the requests of an engine and their waits.

    Args:
        max_finished: maximum number of requests that are kept after they ended.

    Attributes:
        cost: the cost model of a step, fitted to the last steps.
    """

    def __init__(self, max_finished: int = 1000) -> None:
        super().__init__(self)
        self.cost = StepCost()
        self.timeline = QueueTimeline()
        self._max_finished = max_finished
        self._ended: OrderedDict[str, TrackedRequest] = OrderedDict()

    # -- queries -------------------------------------------------------------------------------------------------

    def get(self, request_id: str) -> TrackedRequest | None:
        """The request with this id of the engine core; None if it is not known."""
        return self.unfinished.get(request_id) or self._ended.get(request_id)

    def requests(self) -> Iterator[TrackedRequest]:
        """All known requests: first those that have ended, in the order of their ends, then the unfinished ones."""
        yield from self._ended.values()
        yield from self.unfinished.values()

    def waiting(self) -> list[TrackedRequest]:
        """The requests in the queue in the order of arrival, without parked siblings."""
        return [r for r in self.unfinished.values() if r.state == "waiting" and r.waits[-1].queued_step is not None]

    def counts(self) -> dict[str, int]:
        """The numbers of unfinished requests with the states "waiting" and "running"."""
        num_running = sum(request.state == "running" for request in self.unfinished.values())
        return {"waiting": len(self.unfinished) - num_running, "running": num_running}

    def slots(self) -> dict[str, int]:
        """The number of slots of each kind after the schedule of the last step; all are free if no request is running.
        Empty before the first step."""
        if self.last_step is None:
            return {}
        slots = {kind: getattr(self.last_step, kind) for kind in SLOT_KINDS}
        return slots if self.counts()["running"] else {**dict.fromkeys(SLOT_KINDS, 0), "free": sum(slots.values())}

    def num_held_blocks(self) -> int:
        """The number of held blocks after the schedule of the last step; 0 if no request is running."""
        if self.started is None or self.last_step is None or not self.counts()["running"]:
            return 0
        return self.started.num_blocks - self.last_step.free_blocks

    def holders(self) -> tuple[BlockHolder, ...]:
        """The running requests after the schedule of the last step, in descending order of their blocks."""
        holders = (
            BlockHolder(r.arrived, r.num_blocks, r.num_computed, max(0, r.max_output_tokens - r.num_output_tokens))
            for r in self.batch.values()
        )
        return tuple(sorted(holders, key=lambda holder: -holder.num_blocks))

    def spans(self, request: TrackedRequest, now: float | None = None) -> list[list[WaitSpan]]:
        """The spans of each wait of a request. Within a wait they follow one another without gaps.

        Args:
            now: the end of a wait that has not ended; None is the schedule of the last step.
        """
        return [self._spans(request, wait, now) for wait in request.waits]

    # -- events --------------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._ended.pop(event.request_id, None)
        super().emit(event)

    def on_start(self) -> None:
        for request in self._ended.values():
            for wait in request.waits:
                wait.spans = self._spans(request, wait, None)
        self.timeline, self.cost = QueueTimeline(), StepCost()

    def on_end(self, request: TrackedRequest) -> None:
        if request.request_id in self.unfinished:  # a request with an id in use was rejected
            return
        self._ended[request.request_id] = request
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > self._max_finished:
            self._ended.popitem(last=False)

    def on_leave(self, request: TrackedRequest) -> None:
        self._store_spans(request)

    def on_step(self, step: Step, rows: Rows) -> None:
        begins_interval = self.timeline.add_step(step)
        self.cost.add(sum(step.num_scheduled) + sum(step.num_padding), self.step_seconds)
        for request_id in step.admitted:
            if (request := self.batch.get(request_id)) is not None:
                self._store_spans(request)
        if begins_interval:
            interval = self._queue_interval(step)
            self.timeline.add_interval(interval, interval.head_tenant if self._is_fair else "")
        if step.step % PRUNE_INTERVAL_STEPS == 0:
            self._prune_timeline()

    @property
    def _is_fair(self) -> bool:
        """Whether requests of other tenants than the head's tenant wait for their turn."""
        return self.started is not None and is_fair(self.started.scheduling_policy)

    def _queue_interval(self, step: Step) -> QueueInterval:
        head = None if step.head_id is None else self.get(step.head_id)
        interval = QueueInterval(
            first_step=step.step,
            reason=step.wait_reason,
            head_id=step.head_id,
            head_tenant="" if head is None else head.tenant,
            free_blocks=step.free_blocks,
            evictable_blocks=step.evictable_blocks,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            waiting_event=None if head is None else head.waiting_event,
            holders=() if step.wait_reason is None else self.holders(),
        )
        if head is not None and head.waits:
            head.waits[-1].headed.append(interval)
        return interval

    def _prune_timeline(self) -> None:
        self._sum_before(self.timeline.next_step - MAX_TIMELINE_STEPS)
        first = [w.first_kept_step for r in self.requests() for w in r.waits if w.spans is None]
        self.timeline.remove_before(min(first, default=self.timeline.next_step))

    def _sum_before(self, step: int) -> None:
        """Sum up the steps before `step` in all waits. Requests of one tenant that are in the queue since earlier sums
        share the spans, unless they have been at its head."""
        time = self.timeline.scheduled_time(step)
        if time is None:
            return
        shared: dict[tuple[str, int, float, float], list[WaitSpan]] = {}
        for request in self.requests():
            for wait in request.waits:
                if wait.spans is not None or wait.first_kept_step >= step:
                    continue
                if wait.end_step is not None and wait.end_step <= step:
                    wait.spans = self._spans(request, wait, None)
                    continue
                end = max(wait.start, time if wait.end is None else min(time, wait.end))
                is_queued = (wait.queued_step or step) <= wait.first_kept_step
                if wait.summed and is_queued and not wait.headed:
                    key = request.tenant, wait.first_kept_step, wait.summed[-1].end, end
                    if (spans := shared.get(key)) is None:
                        spans = shared[key] = self._kept_spans(request, wait, step, end)
                else:
                    spans = self._kept_spans(request, wait, step, end)
                wait.summed = sum_by_reason([*wait.summed, *spans], request.request_id)
                wait.summed_step = step

    # -- spans ---------------------------------------------------------------------------------------------------

    def _store_spans(self, request: TrackedRequest) -> None:
        """Store the spans of a wait that has ended. Other intervals are dropped, because each lists a whole batch."""
        wait = request.waits[-1]
        if wait.end_step is not None and wait.end_step <= self.timeline.next_step:
            wait.spans = self._spans(request, wait, None)
            wait.headed.clear()

    def _spans(self, request: TrackedRequest, wait: Wait, now: float | None) -> list[WaitSpan]:
        if wait.spans is not None:
            return wait.spans
        end_step = self.timeline.next_step if wait.end_step is None else wait.end_step
        kept = self._kept_spans(request, wait, end_step, self._end_of(wait, now))
        if wait.summed and kept and wait.summed[-1].reason == kept[0].reason:
            return [*wait.summed[:-1], wait.summed[-1].joined(kept[0], request.request_id), *kept[1:]]
        return wait.summed + kept

    def _kept_spans(self, request: TrackedRequest, wait: Wait, end_step: int, end: float) -> list[WaitSpan]:
        """The spans of a wait, after those that are summed up, until the step `end_step` at the time `end`."""
        rows_of_wait = self._rows(request, wait, end_step, end)
        parts = [(reason, list(rows)) for reason, rows in groupby(rows_of_wait, key=lambda row: row.reason)]
        if not parts:
            return []
        starts = [wait.summed[-1].end if wait.summed else wait.start]
        for (_, before), (_, rows) in pairwise(parts):
            seconds = [row.seconds for row in before if row.seconds is not None]
            scheduled = starts[-1] + sum(seconds) if seconds else self.timeline.scheduled_time(rows[0].first)
            starts.append(starts[-1] if scheduled is None else min(max(scheduled, starts[-1]), end))
        spans = [
            WaitSpan(
                reason,
                start,
                until,
                sum(row.end - row.first for row in rows),
                _interval_of(request, wait, rows),
            )
            for (reason, rows), (start, until) in zip(parts, pairwise([*starts, end]), strict=True)
        ]
        return [span for span in spans if span.num_steps or span.end > span.start]

    def _end_of(self, wait: Wait, now: float | None) -> float:
        if wait.end is not None:
            return wait.end
        if now is None:
            now = wait.start if self.last_step is None else self.last_step.scheduled_time
        return max(wait.start, now)

    def _rows(self, request: TrackedRequest, wait: Wait, end_step: int, end: float) -> Iterator[_WaitRow]:
        """The steps of a wait in order, after a row without steps for the time until the first one. Steps that are
        summed up are left out."""
        first_step = wait.first_kept_step
        if not wait.summed:
            yield _WaitRow("restart" if wait.is_restart else NEXT_STEP, first_step, first_step)
        queued_step = end_step if wait.queued_step is None else wait.queued_step
        known = min(queued_step, end_step, self.timeline.next_step)
        if known > first_step:
            yield _WaitRow(SIBLING_PREFILL, first_step, known)
        start = max(queued_step, first_step)
        if self.timeline.num_runs(start, end_step) > MAX_RUNS:
            yield from self._summed_rows(request, start, end_step, end)
            return
        for first, until, interval in self.timeline.slice(start, end_step):
            yield _WaitRow(self._reason(request, interval), first, until, interval)

    def _summed_rows(self, request: TrackedRequest, start: int, end_step: int, end: float) -> Iterator[_WaitRow]:
        """One row for each reason for which the request waited from `start` on."""
        start, _, interval = next(self.timeline.slice(start, end_step))
        for reason, (count, seconds) in self.timeline.sums(start, end_step, end, request.tenant).items():
            yield _WaitRow(reason or UNKNOWN, start, start + count, interval, seconds)
            start += count

    def _reason(self, request: TrackedRequest, interval: QueueInterval) -> str:
        """The reason of an interval for a request."""
        if interval.reason is None:
            return UNKNOWN
        if self._is_fair and interval.reason != UNKNOWN and interval.head_tenant != request.tenant:
            return FAIRNESS
        return interval.reason


def _interval_of(request: TrackedRequest, wait: Wait, rows: list[_WaitRow]) -> QueueInterval | None:
    """The interval that explains consecutive rows with one reason: the first one with the request at the head."""
    first = rows[0].interval
    if first is None or first.head_id == request.request_id:
        return first
    headed = (interval for interval in wait.headed if rows[0].first <= interval.first_step < rows[-1].end)
    return next(headed, first)
