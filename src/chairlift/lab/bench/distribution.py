"""Statistics over repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from chairlift.lab.metrics.percentile import percentile

DEFAULT_PERCENTILES = (90.0, 99.0)


@dataclass(frozen=True, slots=True)
class MeasuredRange:
    """The median, the minimum and the maximum over the repeats of a measurement, in the unit of the values."""

    median: float
    min: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float | None]) -> MeasuredRange | None:
        """The range of the values; None if a value is missing or there are none."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return cls(median(known), min(known), max(known))


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
    def from_values(
        cls, values: Sequence[float], percents: Sequence[float] = DEFAULT_PERCENTILES
    ) -> Distribution | None:
        """The distribution of the values; None if there are none."""
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
        """The statistics by name for JSON; percentile 99 is `p99`."""
        named = {name: getattr(self, name) for name in ("count", "mean", "median", "std", "min", "max")}
        return {**named, **{f"p{percent:g}": value for percent, value in self.percentiles.items()}}
