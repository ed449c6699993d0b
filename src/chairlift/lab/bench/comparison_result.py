"""Figures of one policy in a comparison, and the checks that the compared runs are equal: same tokens, same speed.

Decode speed is compared on requests that all policies run alike. The steps of the compared runs are not comparable:
with the same number of rows, one policy runs them early and another one late, when contexts are longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from chairlift.events import Event
from chairlift.lab.bench.distribution import MeasuredRange
from chairlift.lab.metrics.run import REPORTED_METRICS, ReportedMetric, RunMetrics
from chairlift.lab.report.memory import KINDS
from chairlift.lab.report.run_log import recorded_run
from chairlift.lab.report.trace import RunTrace
from chairlift.lab.report.waste import WasteShares, waste_shares

MIN_STEPS: Final = 10
"""Minimum number of decode steps of one size for the median speed of a policy."""

TOLERANCE: Final = 0.15
"""Largest relative difference in decode speed between comparable policies. Steps of one size differ in their contexts
and in the work around them."""

StepSpeeds = Mapping[int, Sequence[float]]
"""Computed tokens per second of each decode step, padding included, by the number of rows of the step."""


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The run of one policy in one round.

    Attributes:
        metrics: metrics over all steps.
        memory: mean shares of the pool by kind, by the true lengths, over the steps in which requests waited.
        step_speeds: speeds of the decode steps.
    """

    metrics: RunMetrics
    memory: WasteShares
    step_speeds: StepSpeeds

    @classmethod
    def from_events(cls, events: Sequence[Event]) -> PolicyRun:
        """Compute the figures from all events of a run, beginning with the start of the engine."""
        run = recorded_run(events)
        return cls(run.metrics, waste_shares(run), step_speeds(run.trace))

    def value(self, metric: ReportedMetric) -> float | None:
        """The unscaled metric. Shares of KV slots are those by the true lengths."""
        return self.memory.shares[metric.key] if metric.key in KINDS else metric.value(self.metrics)

    def to_dict(self) -> dict[str, Any]:
        """The run for JSON, without the single steps."""
        true_lengths = {**self.memory.shares, "while_requests_wait": self.memory.is_saturated}
        return {**self.metrics.to_dict(), "memory_true_lengths": true_lengths}


WITH_RATIO: Final = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "e2e_latency_p50",
    "e2e_latency_p99",
    "ttft_p50",
    "ttft_p99",
)
"""The metrics whose ratio to the baseline is also shown."""

_KEYS: Final = (
    *WITH_RATIO,
    "mean_batch_size",
    "mean_batch_tokens",
    *KINDS,
    "padding_tokens",
    "recomputed_tokens",
    "preemptions",
)
COMPARED: Final = tuple(metric for key in _KEYS for metric in REPORTED_METRICS if metric.key == key)
"""The metrics of a comparison, in the order of the table."""


def metric_range(metric: ReportedMetric, runs: Sequence[PolicyRun]) -> MeasuredRange | None:
    """The unscaled metric over the rounds of a policy."""
    return MeasuredRange.from_values([run.value(metric) for run in runs])


def ratio_range(
    metric: ReportedMetric, runs: Sequence[PolicyRun], baseline: Sequence[PolicyRun]
) -> MeasuredRange | None:
    """The ratio of the metric to that of the baseline, computed in each round: a machine that becomes slower between
    rounds does not change it."""
    ratios: list[float | None] = []
    for run, base in zip(runs, baseline, strict=True):
        value, base_value = run.value(metric), base.value(metric)
        ratios.append(None if value is None or not base_value else value / base_value)
    return MeasuredRange.from_values(ratios)


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first output token of a request that differs from that of the baseline."""

    round: int
    request_id: str
    policy: str
    position: int


@dataclass(slots=True)
class TokenCheck:
    """Whether all policies generated the same tokens for every request.

    Policies change only what is computed together. Greedy tokens may therefore differ only by rounding: if two tokens
    are almost equally likely, or if the data type has few digits.

    Attributes:
        num_requests: number of requests of all rounds.
        num_same: number of requests with the same tokens under every policy.
        first_difference: the first difference; None if there is none.
    """

    num_requests: int = 0
    num_same: int = 0
    first_difference: TokenDifference | None = None

    @property
    def is_same(self) -> bool:
        return self.num_same == self.num_requests

    def add_round(self, number: int, tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Compare the output tokens of one round, by policy and request id."""
        (_, first), *others = tokens.items()
        for request_id, expected in first.items():
            self.num_requests += 1
            different = next((policy for policy, answers in others if answers[request_id] != expected), None)
            if different is None:
                self.num_same += 1
            elif self.first_difference is None:
                pairs = zip(tokens[different][request_id], expected, strict=True)
                position = next(i for i, (token, other) in enumerate(pairs) if token != other)
                self.first_difference = TokenDifference(number, request_id, different, position)


def step_speeds(trace: RunTrace) -> dict[int, list[float]]:
    """Tokens per second, padding included, of each step in which every row computes one token; by number of rows."""
    speeds: dict[int, list[float]] = defaultdict(list)
    for step, seconds in zip(trace.steps, (trace.ends - trace.starts).tolist(), strict=True):
        num_rows = len(step.request_ids)
        padding = step.num_padding or [0] * num_rows
        is_decode = all(sum(pair) == 1 for pair in zip(step.num_scheduled, padding, strict=True))
        if is_decode and seconds > 0:
            speeds[num_rows].append(num_rows / seconds)
    return dict(speeds)


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """The median of the computed tokens per second over `num_steps` steps."""

    tokens_per_s: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class SpeedDifference:
    """How much faster the fastest policy is than the slowest one at this number of rows, as a share of the slowest."""

    num_rows: int
    share: float


@dataclass(frozen=True, slots=True)
class SpeedCheck:
    """Decode speeds by number of rows and policy, for numbers of rows at which at least two policies have a speed."""

    speeds: dict[int, dict[str, DecodeSpeed]]

    @classmethod
    def from_steps(cls, steps: Mapping[str, Sequence[StepSpeeds]]) -> SpeedCheck:
        """Compute the medians from the decode steps of the runs of each policy."""
        speeds: dict[int, dict[str, DecodeSpeed]] = defaultdict(dict)
        for policy, runs in steps.items():
            for num_rows in {num_rows for run in runs for num_rows in run}:
                values = [value for run in runs for value in run.get(num_rows, ())]
                if len(values) >= MIN_STEPS:
                    speeds[num_rows][policy] = DecodeSpeed(median(values), len(values))
        return cls({num_rows: speeds[num_rows] for num_rows in sorted(speeds) if len(speeds[num_rows]) > 1})

    @property
    def largest(self) -> SpeedDifference | None:
        """The largest difference; None if no two policies have enough steps with the same number of rows."""
        differences = []
        for num_rows, by_policy in self.speeds.items():
            values = [speed.tokens_per_s for speed in by_policy.values()]
            differences.append(SpeedDifference(num_rows, max(values) / min(values) - 1))
        return max(differences, key=lambda difference: difference.share, default=None)

    def to_dict(self) -> dict[str, Any]:
        """The check for JSON."""
        largest = self.largest
        return {
            "tolerance": TOLERANCE,
            "largest_difference": largest and asdict(largest),
            "by_num_rows": {
                str(num_rows): {policy: asdict(speed) for policy, speed in by_policy.items()}
                for num_rows, by_policy in self.speeds.items()
            },
        }
