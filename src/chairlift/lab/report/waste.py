"""The mean use of KV memory of a run by kind of slot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chairlift.lab.report.memory import KINDS, kind_shares
from chairlift.lab.report.recorded_run import RecordedRun


@dataclass(frozen=True, slots=True)
class WasteShares:
    """The mean shares of the pool by kind, over the steps with waiting requests if `is_saturated`, else over all."""

    shares: dict[str, float]
    is_saturated: bool


def waste_shares(run: RecordedRun) -> WasteShares:
    """The mean shares over the steps with waiting requests, because memory that no request needs is not wasted; over
    all steps if no request waited."""
    trace = run.trace
    weights = trace.held_ends() - trace.starts
    waited = np.array([step.num_waiting > 0 for step in trace.steps])
    is_saturated = bool((weights * waited).sum() > 0)
    if is_saturated:
        weights = weights * waited
    if not weights.sum():
        weights = np.ones(len(weights))
    shares = np.average(kind_shares(run.kinds), axis=0, weights=weights)
    return WasteShares(dict(zip(KINDS, shares.tolist(), strict=True)), is_saturated)
