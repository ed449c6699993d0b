"""What is said about a set of measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from chairlift.lab.metrics.percentile import percentile

DEFAULT_PERCENTILES = (90.0, 99.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, median, standard deviation (of the population), range and percentiles, in the unit of the values."""

    count: int
    mean: float
    median: float
    std: float
    min: float
    max: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values: Sequence[float], percents: Sequence[float] = DEFAULT_PERCENTILES) -> Distribution | None:
        """None if there are no values."""
        if not values:
            return None
        return cls(
            count=len(values),
            mean=fmean(values),
            median=percentile(values, 50),
            std=pstdev(values),
            min=min(values),
            max=max(values),
            percentiles={percent: percentile(values, percent) for percent in percents},
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; percentile 99 is `p99`."""
        plain = {name: getattr(self, name) for name in ("count", "mean", "median", "std", "min", "max")}
        return {**plain, **{f"p{percent:g}": value for percent, value in self.percentiles.items()}}
