"""Converts values of steps to values of time bins of equal width, so that figures of many steps remain small."""

from __future__ import annotations

import numpy as np

from chairlift.lab.report.trace import Floats, RunTrace


def amounts_in_bins(starts: Floats, ends: Floats, amounts: Floats, edges: Floats) -> Floats:
    """Split the amount of every step over the bins in proportion to time.

    Args:
        starts, ends, amounts: [steps]; the steps in order and without overlap.
        edges: [bins + 1], rising.

    Returns:
        [bins]; adds up to the amounts of the steps within the edges.
    """
    times = np.empty(2 * len(starts))
    times[0::2], times[1::2] = starts, ends
    total = np.empty(2 * len(starts))
    total[1::2] = np.cumsum(amounts)
    total[0], total[2::2] = 0.0, total[1:-1:2]
    return np.diff(np.interp(edges, times, total))


def rates(starts: Floats, ends: Floats, amounts: Floats, edges: Floats) -> Floats:
    """The amount per second in each bin."""
    return amounts_in_bins(starts, ends, amounts, edges) / np.diff(edges)


def means(starts: Floats, ends: Floats, values: Floats, edges: Floats) -> Floats:
    """The mean over time of a value in each bin; the value is 0 while no step runs."""
    return rates(starts, ends, values * (ends - starts), edges)


def time_edges(trace: RunTrace, duration: float, num_bins: int) -> Floats:
    """The edges of bins over a run, with the width of `num_bins` bins over `duration`."""
    width = duration / num_bins
    return np.append(np.arange(0, trace.duration, width), trace.duration)


def stairs(edges: Floats, values: Floats) -> tuple[Floats, Floats]:
    """x and y of a step line with a constant value in each bin."""
    return np.repeat(edges, 2)[1:-1], np.repeat(values, 2)
