"""Reconstructs from events when each request was in the batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from chairlift.events import EngineStarted, Event, RequestArrived, Step
from chairlift.observability.replay import Replay, ReplayReader, Rows
from chairlift.observability.tracked_request import TrackedRequest

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class Residency:
    """The time of a request in the batch, from an admission until it ends or is preempted; in a static batch, until the
    batch ends.

    Attributes:
        first, last: positions of the first and the last step in `RunTrace.steps`.
    """

    request: TrackedRequest
    first: int
    last: int


@dataclass(slots=True)
class RunTrace:
    """The requests and steps of one run, and when each request was in the batch.

    Attributes:
        residencies: the periods of requests in the batch, in the order of admission.
        starts, ends: the times of each step in seconds since `origin`. A step that was scheduled while another step ran
            starts at the end of that step. If the clock did not move, step i starts at i and ends at i + 1.
    """

    started: EngineStarted
    requests: list[TrackedRequest]
    steps: list[Step]
    residencies: list[Residency]
    origin: float
    starts: Floats
    ends: Floats

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

    The events must come from one engine, and contain a step.
    """
    tracer = _Tracer()
    for event in events:
        tracer.emit(event)
    return tracer.result()


class _Tracer(ReplayReader):
    """Builds a trace from events. `_open` maps the requests in the batch to their residencies, which have not ended."""

    def __init__(self) -> None:
        self._replay = Replay(self)
        self._requests: list[TrackedRequest] = []
        self._steps: list[Step] = []
        self._residencies: list[Residency] = []
        self._open: dict[str, Residency] = {}

    def emit(self, event: Event) -> None:
        self._replay.emit(event)
        if isinstance(event, RequestArrived):
            self._requests.append(self._replay.unfinished[event.request_id])

    def on_step(self, step: Step, rows: Rows) -> None:
        position = len(self._steps)
        self._steps.append(step)
        for request_id in step.preempted:
            if request_id in self._open:  # otherwise it has ended before the step
                self._close(request_id, position - 1)
        for request_id in step.admitted:
            residency = Residency(self._replay.batch[request_id], position, position)
            self._open[request_id] = residency
            self._residencies.append(residency)

    def on_leave(self, request: TrackedRequest) -> None:
        residency = self._open.get(request.request_id)
        if residency is not None and residency.request is request:
            self._close(request.request_id, len(self._steps) - 1)

    def _close(self, request_id: str, last: int) -> None:
        self._open.pop(request_id).last = last

    def result(self) -> RunTrace:
        started, steps = self._replay.started, self._steps
        assert started is not None
        assert steps
        for request_id in list(self._open):
            self._close(request_id, len(steps) - 1)
        origin = min([steps[0].scheduled_time, *(request.arrived.time for request in self._requests)])
        return RunTrace(started, self._requests, steps, self._residencies, origin, *_times(steps, origin))


def final_slots(request: TrackedRequest) -> int:
    """The number of slots that a request has written at its end: P + n - 1 for P prompt and n output tokens. For an
    unfinished request, n is the forced length or `max_tokens`."""
    num_output = request.max_output_tokens if request.finished is None else request.num_output_tokens
    known = request.arrived.num_prompt_tokens + num_output - 1 if num_output else 0
    return max(known, request.num_computed, request.recompute_until)


def _times(steps: list[Step], origin: float) -> tuple[Floats, Floats]:
    ends = np.array([step.time for step in steps]) - origin
    if ends[-1] <= 0:
        positions = np.arange(len(steps) + 1, dtype=np.float64)
        return positions[:-1], positions[1:]
    starts = np.array([step.scheduled_time for step in steps]) - origin
    starts[1:] = np.maximum(starts[1:], ends[:-1])
    return starts, ends
