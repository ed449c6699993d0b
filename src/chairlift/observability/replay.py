"""Replays the events of an engine: the one state machine from which trackers, metrics, pictures and counters read."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, repeat
from typing import Final

from chairlift.events import (
    EngineStarted,
    Event,
    PrefixMatched,
    RequestArrived,
    RequestFinished,
    RequestQueued,
    RequestRejected,
    RequestWaiting,
    Step,
    StepTimeChanged,
)
from chairlift.observability.step_cost import seconds_of_step
from chairlift.observability.tracked_request import TrackedRequest, Wait

SIBLING_PREFILL: Final = "sibling_prefill"

Rows = list[tuple[TrackedRequest, int]]
"""The rows of a step whose requests are known: each request with its entry in the columns of the step."""


class ReplayReader:
    """The base class of readers, which a `Replay` notifies of changes of its state."""

    def on_start(self) -> None:
        """An engine has started. The requests of an earlier one have ended as lost, and the replay still has its
        configuration and its last step."""

    def on_step(self, step: Step, rows: Rows) -> None:
        """A step was applied. Requests that ended with it are still in the batch, because they held blocks in it."""

    def on_end(self, request: TrackedRequest) -> None:
        """A request has finished, was rejected, or was lost with its engine. Steps that contain it may follow.

        A rejected request may have the id of an unfinished one.
        """

    def on_leave(self, request: TrackedRequest) -> None:
        """A request that has ended holds no blocks any more, and no step that contains it follows."""


class Replay:
    """An event sink that keeps the state of an engine: its unfinished requests, its batch and its last step.

    Events about unknown requests are ignored. Steps may be missing, as their events are dropped for slow listeners.

    Attributes:
        started: the configuration of the engine, with the latest `step_time`; None before its first event.
        last_step: None before the first one.
        next_step: the number of the step after the last one.
        step_seconds: the seconds that the last step took.
        unfinished: by id, in the order of arrival.
        batch: the requests that held blocks after the schedule of the last step, by id, in the order of admission.
    """

    def __init__(self, *readers: ReplayReader) -> None:
        self.started: EngineStarted | None = None
        self.last_step: Step | None = None
        self.next_step = 0
        self.step_seconds = 0.0
        self.unfinished: dict[str, TrackedRequest] = {}
        self.batch: dict[str, TrackedRequest] = {}
        self._leaving: dict[str, list[TrackedRequest]] = {}
        self._lost_ids: set[str] = set()
        self._num_arrived = 0
        self._readers = list(readers)

    def add_reader(self, reader: ReplayReader) -> None:
        """Notify a reader of later changes, after the readers that were added before."""
        self._readers.append(reader)

    @property
    def is_static(self) -> bool:
        """Whether requests are computed in static batches, which return all tokens when they end."""
        return self.started is not None and self.started.batching == "static"

    @property
    def remaining(self) -> list[TrackedRequest]:
        """The requests that a later step may contain: those that have ended first."""
        return [*chain.from_iterable(self._leaving.values()), *self.unfinished.values()]

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self._apply_step(event)
        elif isinstance(event, RequestArrived):
            self._add_request(event)
        elif isinstance(event, RequestQueued):
            if (request := self.unfinished.get(event.request_id)) is not None:
                request.waits[-1].queued_step = event.step
        elif isinstance(event, PrefixMatched):
            if (request := self.unfinished.get(event.request_id)) is not None:
                request.prefix = event
        elif isinstance(event, RequestWaiting):
            self._record_waiting(event)
        elif isinstance(event, RequestFinished):
            self._finish(event)
        elif isinstance(event, RequestRejected):
            self._reject(event)
        elif isinstance(event, EngineStarted):
            self._restart(event)
        elif isinstance(event, StepTimeChanged) and self.started is not None:
            self.started = replace(self.started, step_time=event.step_time)

    # -- requests ------------------------------------------------------------------------------------------------

    def _restart(self, event: EngineStarted) -> None:
        """Reset everything for a new engine. Lost requests that the server sends again arrive again."""
        self.end(event.time)
        for reader in self._readers:
            reader.on_start()
        self.started, self.last_step, self.next_step = event, None, 0

    def end(self, time: float) -> None:
        """Record the end of the engine, whose unfinished requests are lost."""
        self._lost_ids = set(self.unfinished) or self._lost_ids
        lost = list(self.unfinished.values())
        for request in lost:
            request.lose(time, self.next_step)
            self._end(request)
        for request in [*chain.from_iterable(self._leaving.values()), *lost]:
            self._leave(request)
        self._leaving.clear()
        self.batch.clear()

    def _add_request(self, event: RequestArrived) -> None:
        wait = Wait(event.time, event.step, event.step, is_restart=event.request_id in self._lost_ids)
        self._lost_ids.discard(event.request_id)
        self.unfinished[event.request_id] = TrackedRequest(self._num_arrived, event, [wait])
        self._num_arrived += 1
        if event.leader_id is not None and (leader := self.unfinished.get(event.leader_id)) is not None:
            leader.num_siblings += 1

    def _record_waiting(self, event: RequestWaiting) -> None:
        if (request := self.unfinished.get(event.request_id)) is None:
            return
        if event.reason == SIBLING_PREFILL:
            request.waits[-1].queued_step = None
        else:
            request.waiting_event = event

    def _reject(self, event: RequestRejected) -> None:
        arrived = RequestArrived(event.time, event.request_id, 0, 0)
        request = TrackedRequest(self._num_arrived, arrived, [], state="rejected", rejection_message=event.message)
        for reader in self._readers:
            reader.on_end(request)

    def _finish(self, event: RequestFinished) -> None:
        if (request := self.unfinished.get(event.request_id)) is None:
            return
        request.finish(event)
        # Old logs have no numbers of steps in their ends: such a request leaves after the step that follows.
        request.end_step = event.step or self.next_step + 1
        self._end(request)
        is_static_member = self.is_static and self._is_member(request)
        is_closed = is_static_member and self._has_closed_batch()
        if self._is_held(request, is_closed):
            self._leaving.setdefault(request.request_id, []).append(request)
        else:
            self._leave(request)
        if is_static_member and not is_closed:
            self._remove_ended()

    def _end(self, request: TrackedRequest) -> None:
        del self.unfinished[request.request_id]
        for reader in self._readers:
            reader.on_end(request)

    def _is_member(self, request: TrackedRequest) -> bool:
        """Whether this request is in the batch, and not a later one with the same id."""
        return self.batch.get(request.request_id) is request

    def _has_closed_batch(self) -> bool:
        """Whether the members of a static batch hold their blocks, because some of them have not ended."""
        return self.is_static and any(request.finished is None for request in self.batch.values())

    def _is_held(self, request: TrackedRequest, is_closed: bool) -> bool:
        """Whether an ended request holds blocks: in the steps that were scheduled before its end, and in a closed
        batch."""
        return self.next_step < request.end_step or (is_closed and self._is_member(request))

    def _remove_ended(self, *, members_only: bool = False) -> None:
        """Remove all ended requests, or all ended members of the batch, that hold no blocks any more."""
        is_closed = self._has_closed_batch()
        staying: dict[str, list[TrackedRequest]] = {}
        for request in chain.from_iterable(self._leaving.values()):
            if self._is_held(request, is_closed) or (members_only and not self._is_member(request)):
                staying.setdefault(request.request_id, []).append(request)
            else:
                self._leave(request)
        self._leaving = staying

    def _leave(self, request: TrackedRequest) -> None:
        if self._is_member(request):
            del self.batch[request.request_id]
        request.block_ids = []
        for reader in self._readers:
            reader.on_leave(request)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _apply_step(self, step: Step) -> None:
        if step.step > self.next_step:
            self.next_step = step.step
            if self._leaving:  # they may have left the batch in a step whose event was dropped
                self._remove_ended(members_only=True)
            self._admit_unseen(step)
        self.next_step = step.step + 1
        self.step_seconds = seconds_of_step(step, self.last_step)
        if step.preempted:
            self._preempt(step)
        if step.admitted:
            self._admit(step)
        self._change_blocks(step)
        rows = self._add_rows(step)
        self.last_step = step
        for reader in self._readers:
            reader.on_step(step, rows)
        if self._leaving:
            self._remove_ended()

    def _admit_unseen(self, step: Step) -> None:
        """Admit the requests of this step that were admitted by a step whose event was dropped."""
        for request_id in step.request_ids:
            is_admitted = request_id in self.batch or request_id in step.admitted
            if not is_admitted and (request := self._find(request_id, step)) is not None:
                request.admit(step.step, step.scheduled_time, 0)
                self.batch[request_id] = request

    def _preempt(self, step: Step) -> None:
        for request_id in step.preempted:
            if (request := self._find(request_id, step)) is not None:
                request.preempt(step.step, step.scheduled_time, step.displaced.get(request_id))
                request.num_swaps += request_id in step.swapped
                self.batch.pop(request_id, None)

    def _admit(self, step: Step) -> None:
        cached = dict(zip(step.request_ids, step.num_computed, strict=True))
        for request_id in step.admitted:
            if (request := self._find(request_id, step)) is not None:
                num_cached = cached.get(request_id, 0)
                num_matched = step.num_matched.get(request_id, num_cached)
                request.admit(step.step, step.scheduled_time, num_cached, num_matched)
                self.batch[request_id] = request

    def _find(self, request_id: str, step: Step) -> TrackedRequest | None:
        """The request of a step with this id: one that has arrived later with the same id is not in it."""
        known = [self.unfinished.get(request_id), *self._leaving.get(request_id, ())]
        return next((each for each in known if each is not None and each.arrived.step <= step.step), None)

    def _change_blocks(self, step: Step) -> None:
        for request_id, block_ids in step.released_blocks.items():
            if (request := self.batch.get(request_id)) is not None:
                released = set(block_ids)
                request.block_ids = [block_id for block_id in request.block_ids if block_id not in released]
        for request_id, block_ids in step.new_blocks.items():
            if (request := self.batch.get(request_id)) is not None:
                request.block_ids += block_ids

    def _add_rows(self, step: Step) -> Rows:
        rows: Rows = []
        batch, seconds, time = self.batch, self.step_seconds, step.time
        columns = zip(
            step.request_ids,
            step.num_computed,
            step.num_kept,
            step.num_scheduled,
            step.num_new,
            step.num_padding or repeat(0),
            strict=False,
        )
        for index, (request_id, start, num_kept, num_scheduled, num_new, padding) in enumerate(columns):
            if (request := batch.get(request_id)) is not None:
                rows.append((request, index))
                request.add_row(start, num_kept, num_scheduled, num_new, padding, seconds, time)
        if step.num_draft:
            rejected = step.num_rejected
            for request, index in rows:
                request.draft_tokens += step.num_draft[index]
                request.accepted_draft_tokens += step.num_draft[index] - rejected[index]
        return rows
