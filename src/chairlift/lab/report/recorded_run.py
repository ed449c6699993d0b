"""A run with the trace and the metrics that are computed from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chairlift.events import EngineStarted, Event
from chairlift.lab.metrics.requests import RequestMetrics, request_metrics
from chairlift.lab.metrics.run import RunMetrics, summarize
from chairlift.lab.report.memory import MemoryKinds, true_kinds
from chairlift.lab.report.trace import RunTrace, trace_events


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run with its trace and metrics.

    Attributes:
        label: its name in pictures.
        kinds: the kinds of slots of each step, with the true output lengths.
    """

    label: str
    trace: RunTrace
    requests: list[RequestMetrics]
    metrics: RunMetrics
    kinds: list[MemoryKinds]

    @property
    def started(self) -> EngineStarted:
        return self.trace.started


def recorded_run(events: Iterable[Event], label: str = "") -> RecordedRun:
    """The run of its events, which must have a step, in the order in which they were emitted."""
    events = list(events)
    trace = trace_events(events)
    return RecordedRun(label, trace, request_metrics(events), summarize(events), true_kinds(trace))
