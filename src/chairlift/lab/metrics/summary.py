"""The summary of a set of numbers."""

from __future__ import annotations

from collections.abc import Sequence
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
