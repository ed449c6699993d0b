"""A run with the trace and the metrics that are computed from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from chairlift.core.kv.kv_groups import KVGroups
from chairlift.events import SLOT_KINDS, EngineStarted, Event, RequestArrived, Step
from chairlift.lab.metrics.requests import RequestMetrics, request_metrics
from chairlift.lab.metrics.run import RunMetrics, summarize
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


def steps_with_true_kinds(trace: RunTrace) -> list[Step]:
    """The steps, whose reserved and internal slots are counted with the final lengths.

    A reserved slot will be written, and an internal slot (internal fragmentation) will not. The running engine cannot
    know this, and counts with `max_tokens` as the output length:

        |-- token states --|------ reserved ------|--------------- internal ---------------|   live
        |-- token states --|- reserved -|-------------------- internal --------------------|   true
                           written      P + n - 1          P + max_tokens - 1              held

    Only the border between reserved and internal changes, so the sum is still the pool. For aborted and unfinished
    requests see `final_slots`.
    """
    steps = []
    for step, reserved in zip(trace.steps, _reserved_slots(trace), strict=True):
        unwritten = step.reserved + step.internal
        reserved = min(reserved, unwritten)
        steps.append(replace(step, reserved=reserved, internal=unwritten - reserved))
    return steps


def _reserved_slots(trace: RunTrace) -> list[int]:
    """The number of slots in each step that are held and will be written. Shared slots are already written."""
    started = trace.started
    groups = KVGroups(tuple(started.kv_windows), started.block_size, started.max_num_batched_tokens)
    rows = []
    for step in trace.steps:
        columns = zip(step.num_computed, step.num_scheduled, step.num_draft or repeat(0), strict=False)
        rows.append(dict(zip(step.request_ids, columns, strict=True)))
    totals = [0] * len(rows)
    for residency in trace.residencies:
        request_id, final = residency.request.request_id, final_slots(residency.request)
        covered = 0  # slots of tokens in all groups, including those that are released or not shared
        reserved = 0
        for position in range(residency.first, residency.last + 1):
            covered += len(trace.steps[position].new_blocks.get(request_id, ())) * groups.block_size
            if request_id in rows[position]:
                computed, scheduled, draft = rows[position][request_id]
                if groups.has_windows and position == residency.first:
                    covered += sum(groups.first_blocks(computed)) * groups.block_size
                reserved = _num_reserved(groups, covered, computed + scheduled - draft, final)
            totals[position] += reserved
    return totals


def _num_reserved(groups: KVGroups, covered: int, computed: int, final: int) -> int:
    """The slots that will be written. Groups with a window cover the blocks of the computed tokens, and the others have
    the rest of the `covered` slots."""
    num_windows = sum(window is not None for window in groups.windows)
    num_full = len(groups.windows) - num_windows
    in_windows = groups.num_blocks(computed) * groups.block_size
    in_full = (covered - num_windows * in_windows) // max(1, num_full)
    return num_full * max(min(in_full, final) - computed, 0) + num_windows * max(min(in_windows, final) - computed, 0)


def kind_shares(steps: Iterable[Step]) -> Floats:
    """The slots of each kind as shares of the pool: [steps, kinds]."""
    slots = np.array([[getattr(step, kind) for kind in SLOT_KINDS] for step in steps], dtype=np.float64)
    shares: Floats = slots / slots.sum(axis=1, keepdims=True)
    return shares


@dataclass(frozen=True, slots=True)
class WasteShares:
    """The mean shares of the pool by kind, over the steps with waiting requests if `is_saturated`, else over all."""

    shares: dict[str, float]
    is_saturated: bool


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run with its trace and metrics.

    Attributes:
        label: its name in pictures.
        true_steps: the steps, with the kinds of slots by the true output lengths.
    """

    label: str
    trace: RunTrace
    requests: list[RequestMetrics]
    metrics: RunMetrics
    true_steps: list[Step]

    @property
    def started(self) -> EngineStarted:
        return self.trace.started

    def waste(self) -> WasteShares:
        """The mean shares over the steps with waiting requests, because memory that no request needs is not wasted;
        over all steps if no request waited."""
        weights = self.trace.held_ends() - self.trace.starts
        waited = np.array([step.num_waiting > 0 for step in self.trace.steps])
        is_saturated = bool((weights * waited).sum() > 0)
        if is_saturated:
            weights = weights * waited
        if not weights.sum():
            weights = np.ones(len(weights))
        shares = np.average(kind_shares(self.true_steps), axis=0, weights=weights)
        return WasteShares(dict(zip(SLOT_KINDS, shares.tolist(), strict=True)), is_saturated)


def recorded_run(events: Iterable[Event], label: str = "") -> RecordedRun:
    """The run of its events, which must have a step, in the order in which they were emitted."""
    events = list(events)
    trace = trace_events(events)
    return RecordedRun(label, trace, request_metrics(events), summarize(events), steps_with_true_kinds(trace))
