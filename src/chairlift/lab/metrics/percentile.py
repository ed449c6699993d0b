"""Percentiles, and the summary of a set of numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of at least one value, by linear interpolation between the closest ranks: type 7 of Hyndman and
    Fan (1996), the default of numpy, R and spreadsheets.

    Args:
        percent: 0 to 100.
    """
    assert values
    assert 0 <= percent <= 100
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """Count, mean, percentiles and maximum of a set of numbers, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Summary | None:
        """The summary of a list of values; None if it is empty."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])

    @classmethod
    def from_counts(cls, counts: Mapping[float, int]) -> Summary | None:
        """The summary of a set in which each value occurs `counts[value]` times; None if it is empty."""
        values = sorted(counts)
        if not values:
            return None
        ends = list(accumulate(counts[value] for value in values))
        total = ends[-1]

        def at(rank: int) -> float:
            return values[bisect_right(ends, rank)]

        def percent(share: float) -> float:
            rank = (total - 1) * share / 100
            below = math.floor(rank)
            return at(below) + (at(min(below + 1, total - 1)) - at(below)) * (rank - below)

        mean = math.fsum(value * counts[value] for value in values) / total
        return cls(total, mean, percent(50), percent(90), percent(99), values[-1])
