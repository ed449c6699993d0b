"""A run with the trace and the metrics that are computed from its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from chairlift.events import SLOT_KINDS, EngineStarted, Event, Step
from chairlift.lab.metrics.requests import RequestMetrics, request_metrics
from chairlift.lab.metrics.run import RunMetrics, summarize
from chairlift.lab.report.memory import kind_shares, steps_with_true_kinds
from chairlift.lab.report.trace import RunTrace, trace_events


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
