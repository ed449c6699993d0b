"""The summary of a set of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np


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
        p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
        return cls(len(values), fmean(values), p50, p90, p99, max(values))

    @classmethod
    def from_counts(cls, counts: Mapping[float, int]) -> Summary | None:
        """The summary of a set in which each value occurs `counts[value]` times; None if it is empty.

        The quantiles are interpolated as by `numpy.quantile`.
        """
        values = sorted(value for value, count in counts.items() if count)
        if not values:
            return None
        ends = np.cumsum([counts[value] for value in values])
        num_values = int(ends[-1])
        positions = np.array((0.5, 0.9, 0.99)) * (num_values - 1)
        weights = positions - np.floor(positions)
        low = np.array(values)[np.searchsorted(ends, np.floor(positions), side="right")]
        high = np.array(values)[np.searchsorted(ends, np.ceil(positions), side="right")]
        p50, p90, p99 = np.where(
            weights < 0.5, low + (high - low) * weights, high - (high - low) * (1 - weights)
        ).tolist()
        return cls(num_values, fmean(values, [counts[value] for value in values]), p50, p90, p99, values[-1])
