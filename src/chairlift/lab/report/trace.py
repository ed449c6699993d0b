"""A run's events as stays: who was in the batch from which step to which, doing what, holding which blocks.

Everything that the report draws over time is derived from a `RunTrace`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from chairlift.events import EngineStarted, Event, RequestArrived, RequestFinished, Step

Floats = npt.NDArray[np.float64]


class RowKind(enum.IntEnum):
    """What a row of the batch computes in a step. PADDING: nothing of its own (before a short prompt, or after END)."""

    PREFILL = 0
    DECODE = 1
    PADDING = 2


class Phase(NamedTuple):
    """Consecutive steps in which a row is of one kind; both ends included."""

    kind: RowKind
    first: int
    last: int


@dataclass(slots=True)
class TracedRequest:
    """A request as its events tell it. `number` counts arrivals from 0; `max_written`: slots it ever had written."""

    number: int
    arrived: RequestArrived
    finished: RequestFinished | None = None
    max_written: int = 0

    @property
    def final_slots(self) -> int:
        """Slots that are written when it ends: P + n - 1 for P prompt and n output tokens, or as many as were written
        by then. Of an unfinished request: if it gets its forced length, or else all of `max_tokens`."""
        arrived, finished = self.arrived, self.finished
        if finished is not None:
            num_output_tokens = finished.num_output_tokens
        elif arrived.output_len is not None:
            num_output_tokens = arrived.output_len
        else:
            num_output_tokens = arrived.max_tokens
        known = arrived.num_prompt_tokens + num_output_tokens - 1 if num_output_tokens else 0
        return max(known, self.max_written)


@dataclass(slots=True)
class Stay:
    """From an admission until the request finishes or is preempted; in a static batch, until the batch ends.

    Attributes:
        first, last: positions of steps in `RunTrace.steps`, both included.
        phases: in order, without overlap; steps in which it had no row are in none.
        blocks: (position of the step, ids of the blocks that it received in it).
    """

    request: TracedRequest
    first: int
    last: int
    phases: list[Phase] = field(default_factory=list)
    blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    has_sampled: bool = False
    left_at: float | None = None


@dataclass(slots=True)
class RunTrace:
    """One run. `stays` are in the order of admission.

    Attributes:
        starts, ends: of every step, in seconds since `origin`; a step that was planned while another one ran starts
            when that one ends. If the clock never moved, the position of the step and the next one.
        is_timed: False if the clock never moved.
    """

    started: EngineStarted
    requests: list[TracedRequest]
    steps: list[Step]
    stays: list[Stay]
    origin: float
    starts: Floats
    ends: Floats
    is_timed: bool

    @property
    def num_slots(self) -> int:
        return self.started.num_blocks * self.started.block_size

    @property
    def duration(self) -> float:
        return float(self.ends[-1])

    def held_ends(self) -> Floats:
        """Like `ends`; but as long as somebody stays, a step lasts until the next one starts."""
        num_over = np.zeros(len(self.steps) + 1, dtype=np.int64)
        for stay in self.stays:
            num_over[stay.first] += 1
            num_over[stay.last] -= 1
        is_over = np.cumsum(num_over)[: len(self.steps) - 1] > 0
        ends = self.ends.copy()
        ends[:-1] = np.where(is_over, self.starts[1:], ends[:-1])
        return ends


def trace_events(events: Iterable[Event]) -> RunTrace:
    """The trace of one run, from its events in the order in which they were emitted.

    The events must be valid for `chairlift.lab.report.run_log`: an EngineStarted first, at least one step, and
    no request in a step that did not arrive before.
    """
    tracer = _Tracer()
    for event in events:
        tracer.take(event)
    return tracer.result()


class _Tracer:
    """Takes events in; `_open` are the stays that have not ended."""

    def __init__(self) -> None:
        self._started: EngineStarted | None = None
        self._requests: list[TracedRequest] = []
        self._latest: dict[str, TracedRequest] = {}
        self._steps: list[Step] = []
        self._stays: list[Stay] = []
        self._open: dict[str, Stay] = {}
        self._leaving: list[str] = []
        self._is_static = False

    def take(self, event: Event) -> None:
        match event:
            case Step():
                self._take_step(event)
            case RequestArrived():
                request = TracedRequest(len(self._requests), event)
                self._requests.append(request)
                self._latest[event.request_id] = request
            case RequestFinished():
                self._finish(event)
            case EngineStarted():
                self._started = event
                self._is_static = event.batching == "static"

    def _finish(self, event: RequestFinished) -> None:
        if (request := self._latest.get(event.request_id)) is not None:
            request.finished = event
        if event.request_id in self._open:
            self._open[event.request_id].left_at = event.time
            self._leaving.append(event.request_id)

    def _take_step(self, step: Step) -> None:
        position = len(self._steps)
        self._steps.append(step)
        if self._is_static:
            if step.admitted:
                self._close(list(self._open), position)
        else:
            self._close(self._left_before(step), position)
            self._close([rid for rid in step.preempted if rid in self._open], position)
        for request_id in step.admitted:
            self._admit(request_id, position)
        for request_id, block_ids in step.new_blocks.items():
            self._open[request_id].blocks.append((position, block_ids))
        self._take_rows(step, position)

    def _admit(self, request_id: str, position: int) -> None:
        """Whoever got all its tokens in its first step has finished by now: that is told before the step is."""
        if request_id in self._open:
            self._close([request_id], position)
        stay = Stay(self._latest[request_id], position, position)
        self._open[request_id] = stay
        self._stays.append(stay)
        if stay.request.finished is not None:
            stay.left_at = stay.request.finished.time
            self._leaving.append(request_id)

    def _left_before(self, step: Step) -> list[str]:
        """Who had finished when the step was planned. A step that was planned ahead may still compute a row of one that
        has finished since."""
        if not self._leaving:
            return []
        rows = set(step.request_ids).difference(step.admitted)
        return [
            rid
            for rid in self._leaving
            if (left_at := self._open[rid].left_at) is not None and left_at <= step.scheduled_time and rid not in rows
        ]

    def _close(self, request_ids: list[str], position: int) -> None:
        """End stays before the step at `position`."""
        for request_id in request_ids:
            self._open.pop(request_id).last = position - 1
        if request_ids and self._leaving:
            self._leaving = [rid for rid in self._leaving if rid in self._open]

    def _take_rows(self, step: Step, position: int) -> None:
        columns = zip(step.request_ids, step.num_scheduled, step.num_computed, step.num_new, strict=True)
        for request_id, num_scheduled, num_computed, num_new in columns:
            stay = self._open[request_id]
            if not num_scheduled:
                kind = RowKind.PADDING
            else:
                kind = RowKind.DECODE if stay.has_sampled else RowKind.PREFILL
                if num_computed + num_scheduled > stay.request.max_written:
                    stay.request.max_written = num_computed + num_scheduled
            if num_new:
                stay.has_sampled = True
            phases = stay.phases
            if phases and phases[-1].kind is kind and phases[-1].last == position - 1:
                phases[-1] = Phase(kind, phases[-1].first, position)
            else:
                phases.append(Phase(kind, position, position))

    def result(self) -> RunTrace:
        assert self._started is not None
        assert self._steps
        self._close(list(self._open), len(self._steps))
        origin = min([self._steps[0].scheduled_time, *(r.arrived.time for r in self._requests)])
        starts, ends, is_timed = _times(self._steps, origin)
        return RunTrace(self._started, self._requests, self._steps, self._stays, origin, starts, ends, is_timed)


def _times(steps: list[Step], origin: float) -> tuple[Floats, Floats, bool]:
    ends = np.array([step.time for step in steps]) - origin
    if ends[-1] <= 0:
        positions = np.arange(len(steps) + 1, dtype=np.float64)
        return positions[:-1], positions[1:], False
    starts = np.array([step.scheduled_time for step in steps]) - origin
    starts[1:] = np.maximum(starts[1:], ends[:-1])
    return starts, ends, True
