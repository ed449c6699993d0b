"""Reconstructs from events when each request was in the batch, what its rows computed, and which blocks it held.

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
    """The kind of a row in a step. PADDING: only padding is computed, before a short prompt or after the end."""

    PREFILL = 0
    DECODE = 1
    PADDING = 2


class Phase(NamedTuple):
    """Consecutive steps with one kind of row; `last` is included."""

    kind: RowKind
    first: int
    last: int


@dataclass(slots=True)
class TracedRequest:
    """A request with its events. `number` counts arrivals from 0; `max_written` is the maximum of its written slots."""

    number: int
    arrived: RequestArrived
    finished: RequestFinished | None = None
    max_written: int = 0

    @property
    def final_slots(self) -> int:
        """The number of slots that are written at the end: P + n - 1 for P prompt and n output tokens. For an
        unfinished request, n is the forced length or `max_tokens`."""
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
class Residency:
    """The time of a request in the batch, from an admission until it ends or is preempted; in a static batch, until the
    batch ends.

    Attributes:
        first, last: positions of the first and the last step in `RunTrace.steps`.
        phases: in order, without overlap; steps without a row of the request are in none.
        blocks: (position of the step, ids of the blocks that the request received in it).
        released: (position of the step, ids of the blocks that the request released before it received others).
    """

    request: TracedRequest
    first: int
    last: int
    phases: list[Phase] = field(default_factory=list)
    blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    released: list[tuple[int, list[int]]] = field(default_factory=list)
    has_sampled: bool = False
    ended_at: float | None = None


@dataclass(slots=True)
class RunTrace:
    """The requests and steps of one run, and when each request was in the batch.

    Attributes:
        residencies: the periods of requests in the batch, in the order of admission.
        starts, ends: the times of each step in seconds since `origin`. A step that was scheduled while another step ran
            starts at the end of that step. If the clock did not move, step i starts at i and ends at i + 1.
        is_timed: False if the clock did not move.
    """

    started: EngineStarted
    requests: list[TracedRequest]
    steps: list[Step]
    residencies: list[Residency]
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
        """The ends of steps, extended to the start of the next step if a request remains in the batch."""
        num_continuing = np.zeros(len(self.steps) + 1, dtype=np.int64)
        for residency in self.residencies:
            num_continuing[residency.first] += 1
            num_continuing[residency.last] -= 1
        is_continuing = np.cumsum(num_continuing)[: len(self.steps) - 1] > 0
        ends = self.ends.copy()
        ends[:-1] = np.where(is_continuing, self.starts[1:], ends[:-1])
        return ends


def trace_events(events: Iterable[Event]) -> RunTrace:
    """The trace of one run from its events, in the order in which they were emitted.

    The events must be valid as in `chairlift.lab.report.run_log.read_log`.
    """
    tracer = _Tracer()
    for event in events:
        tracer.add(event)
    return tracer.result()


class _Tracer:
    """Builds a trace from events. `_open` maps the requests in the batch to their residencies, which have not ended."""

    def __init__(self) -> None:
        self._started: EngineStarted | None = None
        self._requests: list[TracedRequest] = []
        self._latest: dict[str, TracedRequest] = {}
        self._steps: list[Step] = []
        self._stays: list[Residency] = []
        self._open: dict[str, Residency] = {}
        self._ended: list[str] = []
        self._is_static = False

    def add(self, event: Event) -> None:
        match event:
            case Step():
                self._add_step(event)
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
            self._open[event.request_id].ended_at = event.time
            self._ended.append(event.request_id)

    def _add_step(self, step: Step) -> None:
        position = len(self._steps)
        self._steps.append(step)
        if self._is_static:
            if step.admitted:
                self._close(list(self._open), position)
        else:
            self._close(self._ended_before(step), position)
            self._close([rid for rid in step.preempted if rid in self._open], position)
        for request_id in step.admitted:
            self._admit(request_id, position)
        for request_id, block_ids in step.released_blocks.items():
            if request_id in self._open:
                self._open[request_id].released.append((position, block_ids))
        for request_id, block_ids in step.new_blocks.items():
            self._open[request_id].blocks.append((position, block_ids))
        self._add_rows(step, position)

    def _admit(self, request_id: str, position: int) -> None:
        """Begin a residency. A request that ends with its first step has already ended, because events of ends precede
        the event of the step."""
        if request_id in self._open:
            self._close([request_id], position)
        residency = Residency(self._latest[request_id], position, position)
        self._open[request_id] = residency
        self._stays.append(residency)
        if residency.request.finished is not None:
            residency.ended_at = residency.request.finished.time
            self._ended.append(request_id)

    def _ended_before(self, step: Step) -> list[str]:
        """The requests that ended before the step was scheduled. A step that was scheduled ahead may still have a row
        of a request that ended later."""
        if not self._ended:
            return []
        rows = set(step.request_ids).difference(step.admitted)
        return [
            rid
            for rid in self._ended
            if (ended_at := self._open[rid].ended_at) is not None
            and ended_at <= step.scheduled_time
            and rid not in rows
        ]

    def _close(self, request_ids: list[str], position: int) -> None:
        """End the residencies of these requests. Their last step is the one before `position`."""
        for request_id in request_ids:
            self._open.pop(request_id).last = position - 1
        if request_ids and self._ended:
            self._ended = [rid for rid in self._ended if rid in self._open]

    def _add_rows(self, step: Step, position: int) -> None:
        columns = zip(step.request_ids, step.num_kept, step.num_computed, step.num_new, strict=True)
        for request_id, num_kept, num_computed, num_new in columns:
            residency = self._open[request_id]
            if not num_kept:
                kind = RowKind.PADDING
            else:
                kind = RowKind.DECODE if residency.has_sampled else RowKind.PREFILL
                if num_computed + num_kept > residency.request.max_written:
                    residency.request.max_written = num_computed + num_kept
            if num_new:
                residency.has_sampled = True
            phases = residency.phases
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
