"""Whether policies computed equally fast: a comparison of policies may differ in what is computed, not in how.

Steps of the comparison itself do not tell: with as many rows, one policy's stand early in the run and another's at its
end, where contexts are longer and the machine may have drifted. So requests that all policies run alike are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from chairlift.lab.report.trace import RunTrace

MIN_STEPS: Final = 10
"""Decode steps with as many rows, before their median says something about a policy."""

TOLERANCE: Final = 0.15
"""Largest difference that leaves policies comparable. Rows differ in their context and steps in the bookkeeping around
them, so none at all cannot be had."""

StepSpeeds = Mapping[int, Sequence[float]]
"""Computed tokens a second of each decode step, padding included, by the number of its rows."""


def step_speeds(trace: RunTrace) -> dict[int, list[float]]:
    """Of the steps in which every row computed one token, or one token of padding."""
    speeds: dict[int, list[float]] = defaultdict(list)
    for step, seconds in zip(trace.steps, (trace.ends - trace.starts).tolist(), strict=True):
        num_rows = len(step.request_ids)
        padding = step.num_padding or [0] * num_rows
        is_decode = all(sum(pair) == 1 for pair in zip(step.num_scheduled, padding, strict=True))
        if is_decode and seconds > 0:
            speeds[num_rows].append(num_rows / seconds)
    return dict(speeds)


@dataclass(frozen=True, slots=True)
class Speed:
    """Median of the computed tokens a second over so many steps."""

    tokens_per_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class Difference:
    """By how much the fastest policy exceeds the slowest one, as a share of the latter, at that many rows."""

    num_rows: int
    share: float


@dataclass(frozen=True, slots=True)
class SpeedCheck:
    """Speeds by number of rows and policy, where at least two policies can be compared."""

    speeds: dict[int, dict[str, Speed]]

    @classmethod
    def of(cls, steps: Mapping[str, Sequence[StepSpeeds]]) -> SpeedCheck:
        """Args: steps: of each policy, the decode steps of its runs."""
        speeds: dict[int, dict[str, Speed]] = defaultdict(dict)
        for policy, runs in steps.items():
            for num_rows in {num_rows for run in runs for num_rows in run}:
                values = [value for run in runs for value in run.get(num_rows, ())]
                if len(values) >= MIN_STEPS:
                    speeds[num_rows][policy] = Speed(median(values), len(values))
        return cls({num_rows: speeds[num_rows] for num_rows in sorted(speeds) if len(speeds[num_rows]) > 1})

    @property
    def largest(self) -> Difference | None:
        """None if no number of rows occurred often enough under two policies."""
        differences = [Difference(num_rows, _difference(by_policy)) for num_rows, by_policy in self.speeds.items()]
        return max(differences, key=lambda difference: difference.share, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        largest = self.largest
        return {
            "tolerance": TOLERANCE,
            "largest_difference": largest and asdict(largest),
            "by_num_rows": {
                str(num_rows): {policy: asdict(speed) for policy, speed in by_policy.items()}
                for num_rows, by_policy in self.speeds.items()
            },
        }


def _difference(by_policy: Mapping[str, Speed]) -> float:
    values = [speed.tokens_per_s for speed in by_policy.values()]
    return max(values) / min(values) - 1
