"""Tracks requests from the events of a running engine: their state, and what they wait for.

The number of requests in memory is bounded: the last `max_finished` requests that ended are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Final

from chairlift.events import (
    EngineStarted,
    Event,
    RequestArrived,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    RequestWaiting,
    Step,
)
from chairlift.observability.queue_timeline import UNKNOWN, BlockHolder, QueueInterval, QueueTimeline
from chairlift.observability.step_cost import StepCost, StepTimer
from chairlift.observability.tracked_request import TrackedRequest, Wait, WaitSpan

NEXT_STEP: Final = "next_step"
FAIRNESS: Final = "fairness"
SIBLING_PREFILL: Final = "sibling_prefill"
PRUNE_INTERVAL_STEPS: Final = 4096
SLOT_KINDS: Final = ("token_states", "reserved", "internal", "external", "free")


class RequestTracker:
    """An event sink that tracks the requests of an engine and their waits.

    Args:
        max_finished: maximum number of requests that are kept after they ended.

    Attributes:
        started: the configuration of the engine; None before its first event.
        last_step: the last step; None before the first one.
        cost: the cost model of a step, fitted to the last steps.
    """

    def __init__(self, max_finished: int = 1000) -> None:
        self.started: EngineStarted | None = None
        self.last_step: Step | None = None
        self.cost = StepCost()
        self.timeline = QueueTimeline()
        self._timer = StepTimer()
        self._max_finished = max_finished
        self._unfinished: dict[str, TrackedRequest] = {}
        self._ended: OrderedDict[str, TrackedRequest] = OrderedDict()
        self._batch: dict[str, TrackedRequest] = {}
        self._leaving: list[TrackedRequest] = []
        self._num_arrived = 0

    # -- queries -------------------------------------------------------------------------------------------------

    def get(self, request_id: str) -> TrackedRequest | None:
        """The request with this id of the engine core; None if it is not known."""
        return self._unfinished.get(request_id) or self._ended.get(request_id)

    def requests(self) -> Iterator[TrackedRequest]:
        """All known requests: first those that have ended, in the order of their ends, then the unfinished ones."""
        yield from self._ended.values()
        yield from self._unfinished.values()

    def unfinished(self) -> list[TrackedRequest]:
        """The requests that have not ended, in the order of arrival, parked siblings included."""
        return list(self._unfinished.values())

    def waiting(self) -> list[TrackedRequest]:
        """The requests in the queue in the order of arrival, without parked siblings."""
        return [r for r in self._unfinished.values() if r.state == "waiting" and r.waits[-1].queued_step is not None]

    def batch(self) -> list[TrackedRequest]:
        """The requests that held blocks after the schedule of the last step, in the order of admission."""
        return list(self._batch.values())

    def counts(self) -> dict[str, int]:
        """The numbers of unfinished requests with the states "waiting" and "running"."""
        num_running = sum(request.state == "running" for request in self._unfinished.values())
        return {"waiting": len(self._unfinished) - num_running, "running": num_running}

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
            for r in self._batch.values()
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
        if isinstance(event, Step):
            self._record_step(event)
        elif isinstance(event, RequestArrived):
            self._add_request(event)
        elif isinstance(event, RequestQueued):
            if (request := self._unfinished.get(event.request_id)) is not None:
                request.waits[-1].queued_step = event.step
        elif isinstance(event, RequestWaiting):
            self._record_waiting(event)
        elif isinstance(event, RequestFinished):
            self._finish(event)
        elif isinstance(event, RequestRejected):
            self._record_rejection(event)
        elif isinstance(event, EngineStarted):
            self._restart(event)

    def _restart(self, event: EngineStarted) -> None:
        """Reset everything for a new engine. Unfinished requests are lost; those that the server sends again arrive
        again."""
        self.end(event.time)
        for request in self._ended.values():
            for wait in request.waits:
                wait.spans = self._spans(request, wait, None)
        self.started, self.last_step = event, None
        self.timeline, self._timer, self.cost = QueueTimeline(), StepTimer(), StepCost()

    def end(self, time: float) -> None:
        """Record the end of the engine, whose unfinished requests are lost."""
        for request in self.unfinished():
            request.lose(time, self.timeline.next_step)
            self._retire(request)
        self._batch.clear()
        self._leaving.clear()

    def _add_request(self, event: RequestArrived) -> None:
        lost = self._ended.pop(event.request_id, None)
        wait = Wait(event.time, event.step, event.step)
        wait.is_restart = lost is not None and lost.state == "lost"
        self._unfinished[event.request_id] = TrackedRequest(self._num_arrived, event, [wait])
        self._num_arrived += 1

    def _record_waiting(self, event: RequestWaiting) -> None:
        request = self._unfinished.get(event.request_id)
        if request is None:
            return
        if event.reason == SIBLING_PREFILL:
            request.waits[-1].queued_step = None
        else:
            request.waiting_event = event

    def _record_rejection(self, event: RequestRejected) -> None:
        arrived = RequestArrived(event.time, event.request_id, 0, 0)
        request = TrackedRequest(self._num_arrived, arrived, [], state="rejected", rejection_message=event.message)
        if event.request_id not in self._unfinished:
            self._retire(request)

    def _finish(self, event: RequestFinished) -> None:
        request = self._unfinished.get(event.request_id)
        if request is None:
            return
        request.finish(event)
        request.num_output_tokens = event.num_output_tokens
        self._retire(request)
        if self.timeline.next_step < event.step:
            self._leaving.append(request)
        else:
            self._leave_batch(request)

    def _retire(self, request: TrackedRequest) -> None:
        self._unfinished.pop(request.request_id, None)
        self._ended[request.request_id] = request
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > self._max_finished:
            self._ended.popitem(last=False)

    def _record_step(self, step: Step) -> None:
        if step.step > self.timeline.next_step:
            self._admit_unseen(step)
        begins_interval = self.timeline.add_step(step)
        seconds = self._timer.seconds(step)
        self.cost.add(sum(step.num_scheduled) + sum(step.num_padding), seconds)
        self._update_batch(step)
        self._add_rows(step, seconds)
        self.last_step = step
        if begins_interval:
            self.timeline.add_interval(self._queue_interval(step))
        self._remove_finished(step)
        if step.step % PRUNE_INTERVAL_STEPS == 0:
            self._prune_timeline()

    def _admit_unseen(self, step: Step) -> None:
        """Admit the requests of this step that were admitted by a step whose event was lost."""
        for request_id in step.request_ids:
            request = self._unfinished.get(request_id)
            if request is not None and request.state == "waiting" and request_id not in step.admitted:
                request.admit(step.step, step.scheduled_time, 0)
                self._batch[request_id] = request

    def _update_batch(self, step: Step) -> None:
        """Apply the preemptions, admissions and allocations of a step."""
        for request_id in step.preempted:
            if (request := self._request_of_step(request_id, step)) is not None:
                request.preempt(step.step, step.scheduled_time)
                self._batch.pop(request_id, None)
        cached = dict(zip(step.request_ids, step.num_computed, strict=True)) if step.admitted else {}
        for request_id in step.admitted:
            if (request := self._request_of_step(request_id, step)) is not None:
                request.admit(step.step, step.scheduled_time, cached.get(request_id, 0))
                self._store_spans(request)
                self._batch[request_id] = request
        for request_id, block_ids in step.new_blocks.items():
            if (request := self._batch.get(request_id)) is not None:
                request.block_ids += block_ids
        for request_id, block_ids in step.released_blocks.items():
            if (request := self._batch.get(request_id)) is not None:
                released = set(block_ids)
                request.block_ids = [block_id for block_id in request.block_ids if block_id not in released]

    def _request_of_step(self, request_id: str, step: Step) -> TrackedRequest | None:
        """The request with this id; None if the step names an earlier request with the same id."""
        request = self.get(request_id)
        return None if request is None or step.step < request.arrived.step else request

    def _add_rows(self, step: Step, seconds: float) -> None:
        batch = self._batch
        paddings = step.num_padding or repeat(0)
        rows = zip(step.request_ids, step.num_computed, step.num_scheduled, step.num_new, paddings, strict=False)
        rejected = step.num_rejected
        for index, (request_id, start, count, num_new, padding) in enumerate(rows):
            if (request := batch.get(request_id)) is not None:
                num_returned = num_new if request.finished is None else 0
                num_rejected = rejected[index] if rejected else 0
                request.add_row(start, count, num_returned, padding, seconds, step.time, num_rejected)
                if step.num_draft:
                    request.draft_tokens += step.num_draft[index]
                    request.accepted_draft_tokens += step.num_draft[index] - num_rejected

    def _queue_interval(self, step: Step) -> QueueInterval:
        head = None if step.head_id is None else self.get(step.head_id)
        return QueueInterval(
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

    def _remove_finished(self, step: Step) -> None:
        """Remove ended requests from the batch. They held their blocks in the steps that were scheduled before."""
        remaining = []
        for request in self._leaving:
            if request.finished is not None and step.step + 1 < request.finished.step:
                remaining.append(request)
            else:
                self._leave_batch(request)
        self._leaving = remaining

    def _leave_batch(self, request: TrackedRequest) -> None:
        self._batch.pop(request.request_id, None)
        request.block_ids = []
        self._store_spans(request)

    def _prune_timeline(self) -> None:
        first = [w.first_step for r in self.requests() for w in r.waits if w.spans is None]
        self.timeline.remove_before(min(first, default=self.timeline.next_step))

    # -- spans ---------------------------------------------------------------------------------------------------

    def _store_spans(self, request: TrackedRequest) -> None:
        """Store the spans of a wait that has ended, each with one interval only: an interval lists a whole batch."""
        wait = request.waits[-1]
        if wait.end_step is not None and wait.end_step <= self.timeline.next_step:
            wait.spans = [span.with_decisive_interval(request.request_id) for span in self._spans(request, wait, None)]

    def _spans(self, request: TrackedRequest, wait: Wait, now: float | None) -> list[WaitSpan]:
        if wait.spans is not None:
            return wait.spans
        end = self._end(wait, now)
        parts = [_Part("restart" if wait.is_restart else NEXT_STEP, wait.first_step, 0), *self._parts(request, wait)]
        starts = [wait.start]
        for part in parts[1:]:
            scheduled = self.timeline.scheduled_time(part.first_step)
            starts.append(starts[-1] if scheduled is None else min(max(scheduled, starts[-1]), end))
        spans = [
            WaitSpan(part.reason, start, until, part.num_steps, tuple(part.intervals))
            for part, (start, until) in zip(parts, pairwise([*starts, end]), strict=True)
        ]
        return [span for span in spans if span.num_steps or span.end > span.start]

    def _end(self, wait: Wait, now: float | None) -> float:
        if wait.end is not None:
            return wait.end
        if now is None:
            now = wait.start if self.last_step is None else self.last_step.scheduled_time
        return max(wait.start, now)

    def _parts(self, request: TrackedRequest, wait: Wait) -> list[_Part]:
        """The steps of a wait, consecutive ones with the same reason together."""
        end_step = self.timeline.next_step if wait.end_step is None else wait.end_step
        queued_step = end_step if wait.queued_step is None else wait.queued_step
        parts: list[_Part] = []
        if queued_step > wait.first_step and self.timeline.next_step > wait.first_step:
            known = min(queued_step, self.timeline.next_step)
            parts.append(_Part(SIBLING_PREFILL, wait.first_step, known - wait.first_step))
        for first, end, interval in self.timeline.slice(queued_step, end_step):
            reason = self._reason(request, interval)
            if not parts or parts[-1].reason != reason or reason == SIBLING_PREFILL:
                parts.append(_Part(reason, first, 0))
            parts[-1].num_steps += end - first
            parts[-1].intervals.append(interval)
        return parts

    def _reason(self, request: TrackedRequest, interval: QueueInterval) -> str:
        """The reason of an interval for a request. Under the fair policy, requests of other tenants than that of the
        head wait for their turn."""
        if interval.reason is None:
            return UNKNOWN
        is_fair = self.started is not None and self.started.scheduling_policy == "fair"
        if is_fair and interval.reason != UNKNOWN and interval.head_tenant != request.tenant:
            return FAIRNESS
        return interval.reason


@dataclass(slots=True)
class _Part:
    reason: str
    first_step: int
    num_steps: int
    intervals: list[QueueInterval] = field(default_factory=list)
