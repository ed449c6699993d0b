"""Normalized latency against request rate, and the rate that a policy sustains: the paper's main figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from chairlift.lab.metrics.run import RunTally
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest

STEPS_AN_OCTAVE: Final = 6
"""Rates between one and its double, where the latency rises."""

THRESHOLDS: Final = (0.1, 0.2, 0.5, 1.0)
"""Seconds of normalized latency at which rates are compared. The paper names none; its figures end at 1."""


class Point(NamedTuple):
    """Mean over the requests of E2E latency by output token, in seconds, at a rate in requests a second."""

    rate: float
    latency: float


def normalized_latency(requests: Sequence[WorkloadRequest], config: SimConfig, cost_model: CostModel) -> float:
    """Simulate to the end: mean over the requests of E2E latency by output token, in seconds."""
    tally = RunTally()
    simulate(requests, config, cost_model, tally)
    summary = tally.result().normalized_latency
    assert summary is not None, "every request is answered"
    return summary.mean


def curve(latency_at: Callable[[float], float], lowest: float, highest: float) -> list[Point]:
    """Points by rate. All rates are on one scale, so that the curves of several policies can be put side by side:

    lowest    2 * lowest    4 * lowest          8 * lowest
       o           o             o   .   .   .   .   o
                                 |-- refined here ---|
          all latencies low                        above all thresholds, or rate above `highest`
    """
    latencies: dict[int, float] = {}

    def measure(index: int) -> bool:
        """Whether the latency at a place on the scale exceeds all thresholds."""
        if index not in latencies:
            latencies[index] = latency_at(lowest * 2 ** (index / STEPS_AN_OCTAVE))
        return latencies[index] > max(THRESHOLDS)

    last = 0
    while not measure(last) and lowest * 2 ** (last / STEPS_AN_OCTAVE) < highest:
        last += STEPS_AN_OCTAVE
    first = max((index for index, latency in latencies.items() if latency <= min(THRESHOLDS)), default=0)
    for index in range(first, last):
        if measure(index):
            break
    return [Point(lowest * 2 ** (index / STEPS_AN_OCTAVE), latencies[index]) for index in sorted(latencies)]


def sustained_rate(points: Sequence[Point], threshold: float) -> float | None:
    """The rate at which the latency first exceeds the threshold, interpolated linearly between two points; None if it
    does so at the first point already, or never."""
    if points[0].latency > threshold:
        return None
    for low, high in pairwise(points):
        if high.latency > threshold:
            return low.rate + (high.rate - low.rate) * (threshold - low.latency) / (high.latency - low.latency)
    return None


def ratio(rate: float | None, other: float | None) -> float | None:
    """None if one of them is unknown."""
    return None if rate is None or other is None else rate / other
