"""Requests as they wait, run and end, followed through the events of a running engine.

Memory is bounded: what has ended is kept until `max_finished` others have ended after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
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
from chairlift.observability.queue_timeline import UNKNOWN, Holder, QueueTimeline, Stretch
from chairlift.observability.step_cost import StepCost, StepTimer
from chairlift.observability.tracked_request import Span, TrackedRequest, Wait

NEXT_STEP: Final = "next_step"
FAIRNESS: Final = "fairness"
SIBLING_PREFILL: Final = "sibling_prefill"
PRUNE_EVERY: Final = 4096
SLOT_KINDS: Final = ("token_states", "reserved", "internal", "external", "free")


class RequestTracker:
    """An event sink that knows what every request waits for, and waited for.

    Args:
        max_finished: requests that have ended and are still known.

    Attributes:
        started: the engine's configuration; None before its first event.
        last_step: None before the first one.
        cost: what its steps take.
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

    # -- questions -----------------------------------------------------------------------------------------------

    def get(self, request_id: str) -> TrackedRequest | None:
        """By the core's id."""
        return self._unfinished.get(request_id) or self._ended.get(request_id)

    def requests(self) -> Iterator[TrackedRequest]:
        """All that are known: first those that have ended, in the order in which they did."""
        yield from self._ended.values()
        yield from self._unfinished.values()

    def waiting(self) -> list[TrackedRequest]:
        """Who is in the queue, parked siblings left out, by arrival."""
        return [r for r in self._unfinished.values() if r.state == "waiting" and r.waits[-1].queued_step is not None]

    def counts(self) -> dict[str, int]:
        """Unfinished requests by state: "waiting" and "running"."""
        num_running = sum(request.state == "running" for request in self._unfinished.values())
        return {"waiting": len(self._unfinished) - num_running, "running": num_running}

    def slots(self) -> dict[str, int]:
        """The pool's slots by kind: after the last step's schedule, and all free once nobody is in the batch any more.
        Empty before the first step."""
        if self.last_step is None:
            return {}
        slots = {kind: getattr(self.last_step, kind) for kind in SLOT_KINDS}
        return slots if self.counts()["running"] else {**dict.fromkeys(SLOT_KINDS, 0), "free": sum(slots.values())}

    def num_held_blocks(self) -> int:
        """After the last step's schedule; none once nobody is in the batch any more."""
        if self.started is None or self.last_step is None or not self.counts()["running"]:
            return 0
        return self.started.num_blocks - self.last_step.free_blocks

    def holders(self) -> tuple[Holder, ...]:
        """The batch after the last step's schedule, the one that holds most first."""
        return _holders(self._batch.values())

    def spans(self, request: TrackedRequest, now: float | None = None) -> list[list[Span]]:
        """What it waited for, one list a wait; within each the spans follow one another without gaps.

        Args:
            now: where a wait that goes on ends; the last step's schedule if None.
        """
        return [self._spans(request, wait, now) for wait in request.waits]

    # -- events --------------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self._take_step(event)
        elif isinstance(event, RequestArrived):
            self._arrive(event)
        elif isinstance(event, RequestQueued):
            if (request := self._unfinished.get(event.request_id)) is not None:
                request.waits[-1].queued_step = event.step
        elif isinstance(event, RequestWaiting):
            self._refuse(event)
        elif isinstance(event, RequestFinished):
            self._finish(event)
        elif isinstance(event, RequestRejected):
            self._turn_away(event)
        else:
            self._start(event)

    def _start(self, event: EngineStarted) -> None:
        """Also after an engine died: what it had begun is lost, and what had not begun will arrive again."""
        for request in list(self._unfinished.values()):
            request.state = "lost"
            if (wait := request.waits[-1]).end is None:
                wait.end, wait.end_step = max(event.time, wait.start), self.timeline.next_step
            self._retire(request)
        for request in self._ended.values():
            for wait in request.waits:
                wait.spans = self._spans(request, wait, None)
        self.started, self.last_step = event, None
        self.timeline, self._timer, self.cost = QueueTimeline(), StepTimer(), StepCost()
        self._batch.clear()
        self._leaving.clear()

    def _arrive(self, event: RequestArrived) -> None:
        lost = self._ended.pop(event.request_id, None)
        wait = Wait(event.time, event.step, event.step)
        wait.is_restart = lost is not None and lost.state == "lost"
        self._unfinished[event.request_id] = TrackedRequest(self._num_arrived, event, [wait])
        self._num_arrived += 1

    def _refuse(self, event: RequestWaiting) -> None:
        request = self._unfinished.get(event.request_id)
        if request is None:
            return
        if event.reason == SIBLING_PREFILL:
            request.waits[-1].queued_step = None
            return
        request.refusal = event
        request.first_refusal = request.first_refusal or event

    def _turn_away(self, event: RequestRejected) -> None:
        arrived = RequestArrived(event.time, event.request_id, 0, 0)
        request = TrackedRequest(self._num_arrived, arrived, [], state="rejected", rejection_message=event.message)
        if event.request_id not in self._unfinished:
            self._retire(request)

    def _finish(self, event: RequestFinished) -> None:
        request = self._unfinished.get(event.request_id)
        if request is None:
            return
        request.end(event)
        request.num_output_tokens = event.num_output_tokens
        self._retire(request)
        if self.timeline.next_step < event.step:
            self._leaving.append(request)
        else:
            self._batch.pop(request.request_id, None)
            self._keep_spans(request)

    def _retire(self, request: TrackedRequest) -> None:
        self._unfinished.pop(request.request_id, None)
        self._ended[request.request_id] = request
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > self._max_finished:
            self._ended.popitem(last=False)

    def _take_step(self, step: Step) -> None:
        if step.step > self.timeline.next_step:
            self._catch_up(step)
        begins = self.timeline.begin(step)
        seconds = self._timer.seconds(step)
        self.cost.add(sum(step.num_scheduled) + sum(step.num_padding), seconds)
        self._move(step)
        self._take_rows(step, seconds)
        self.last_step = step
        if begins:
            self.timeline.add(self._stretch(step))
        self._leave(step)
        if step.step % PRUNE_EVERY == 0:
            self._prune()

    def _move(self, step: Step) -> None:
        """Who came into the batch with this step, and who was thrown out of it."""
        for request_id in step.preempted:
            if (request := self._of_step(request_id, step)) is not None:
                request.preempt(step.step, step.scheduled_time)
                self._batch.pop(request_id, None)
        cached = dict(zip(step.request_ids, step.num_computed, strict=True)) if step.admitted else {}
        for request_id in step.admitted:
            if (request := self._of_step(request_id, step)) is not None:
                request.admit(step.step, step.scheduled_time, cached.get(request_id, 0))
                self._keep_spans(request)
                self._batch[request_id] = request
        for request_id, block_ids in step.new_blocks.items():
            if (request := self._batch.get(request_id)) is not None:
                request.num_blocks += len(block_ids)

    def _catch_up(self, step: Step) -> None:
        """The steps before it were lost: who is in it and was not let in by it was let in by one of those."""
        for request_id in step.request_ids:
            request = self._unfinished.get(request_id)
            if request is not None and request.state == "waiting" and request_id not in step.admitted:
                request.admit(step.step, step.scheduled_time, 0)
                self._batch[request_id] = request

    def _of_step(self, request_id: str, step: Step) -> TrackedRequest | None:
        """A request that the step names, unless that was an earlier one of the same id."""
        request = self.get(request_id)
        return None if request is None or step.step < request.arrived.step else request

    def _take_rows(self, step: Step, seconds: float) -> None:
        batch = self._batch
        padding = step.num_padding or repeat(0)
        rows = zip(step.request_ids, step.num_computed, step.num_scheduled, step.num_new, padding, strict=False)
        for request_id, start, count, num_new, padded in rows:
            if (request := batch.get(request_id)) is not None:
                told = num_new if request.finished is None else 0
                request.take_row(start, count, told, padded, seconds, step.time)

    def _stretch(self, step: Step) -> Stretch:
        head = None if step.head_id is None else self.get(step.head_id)
        return Stretch(
            first_step=step.step,
            reason=step.wait_reason,
            head_id=step.head_id,
            head_tenant="" if head is None else head.tenant,
            free_blocks=step.free_blocks,
            evictable_blocks=step.evictable_blocks,
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            refusal=None if head is None else head.refusal,
            holders=() if step.wait_reason is None else self.holders(),
        )

    def _leave(self, step: Step) -> None:
        """Who has ended held its memory in the steps that were planned before."""
        staying = []
        for request in self._leaving:
            if request.end_step is not None and step.step + 1 < request.end_step:
                staying.append(request)
            else:
                self._batch.pop(request.request_id, None)
                self._keep_spans(request)
        self._leaving = staying

    def _prune(self) -> None:
        first = [w.first_step for r in self.requests() for w in r.waits if w.spans is None]
        self.timeline.forget_before(min(first, default=self.timeline.next_step))

    # -- spans ---------------------------------------------------------------------------------------------------

    def _keep_spans(self, request: TrackedRequest) -> None:
        """What is kept for long names few stretches, each of which names a whole batch."""
        wait = request.waits[-1]
        if wait.end_step is not None and wait.end_step <= self.timeline.next_step:
            spans = self._spans(request, wait, None)
            wait.spans = [span._replace(stretches=span.telling(request.request_id)) for span in spans]

    def _spans(self, request: TrackedRequest, wait: Wait, now: float | None) -> list[Span]:
        if wait.spans is not None:
            return wait.spans
        end = self._end_of(wait, now)
        parts = [_Part("restart" if wait.is_restart else NEXT_STEP, wait.first_step, 0), *self._parts(request, wait)]
        starts = [wait.start]
        for part in parts[1:]:
            planned = self.timeline.time_of(part.first_step)
            starts.append(starts[-1] if planned is None else min(max(planned, starts[-1]), end))
        spans = [
            Span(part.reason, start, until, part.num_steps, tuple(part.stretches))
            for part, (start, until) in zip(parts, pairwise([*starts, end]), strict=True)
        ]
        return [span for span in spans if span.num_steps or span.end > span.start]

    def _end_of(self, wait: Wait, now: float | None) -> float:
        if wait.end is not None:
            return wait.end
        if now is None:
            now = wait.start if self.last_step is None else self.last_step.scheduled_time
        return max(wait.start, now)

    def _parts(self, request: TrackedRequest, wait: Wait) -> list[_Part]:
        """Its steps by reason, those in a row with the same one together."""
        end_step = self.timeline.next_step if wait.end_step is None else wait.end_step
        queued_step = end_step if wait.queued_step is None else wait.queued_step
        parts: list[_Part] = []
        if queued_step > wait.first_step and self.timeline.next_step > wait.first_step:
            known = min(queued_step, self.timeline.next_step)
            parts.append(_Part(SIBLING_PREFILL, wait.first_step, known - wait.first_step))
        for first, end, stretch in self.timeline.slice(queued_step, end_step):
            reason = self._reason(request, stretch)
            if not parts or parts[-1].reason != reason or reason == SIBLING_PREFILL:
                parts.append(_Part(reason, first, 0))
            parts[-1].num_steps += end - first
            parts[-1].stretches.append(stretch)
        return parts

    def _reason(self, request: TrackedRequest, stretch: Stretch) -> str:
        """Under the fair policy whoever is not of the head's tenant waits for the turn."""
        if stretch.reason is None:
            return UNKNOWN
        is_fair = self.started is not None and self.started.scheduling_policy == "fair"
        if is_fair and stretch.reason != UNKNOWN and stretch.head_tenant != request.tenant:
            return FAIRNESS
        return stretch.reason


@dataclass(slots=True)
class _Part:
    reason: str
    first_step: int
    num_steps: int
    stretches: list[Stretch] = field(default_factory=list)


def _holders(batch: Iterable[TrackedRequest]) -> tuple[Holder, ...]:
    holders = [
        Holder(
            request.request_id,
            request.tenant,
            request.num_blocks,
            request.arrived.num_prompt_tokens,
            request.arrived.max_tokens,
            request.arrived.output_len,
            request.num_computed,
            max(0, request.limit - request.num_output_tokens),
        )
        for request in batch
    ]
    holders.sort(key=lambda holder: -holder.num_blocks)
    return tuple(holders)
