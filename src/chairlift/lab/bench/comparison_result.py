"""What a comparison says about a policy: figures over rounds, and how many times those of the first policy they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from chairlift.events import Event
from chairlift.lab.bench.decode_speed import StepSpeeds, step_speeds
from chairlift.lab.bench.throughput import Spread
from chairlift.lab.metrics.reported_metrics import REPORTED_METRICS
from chairlift.lab.metrics.run import RunMetrics
from chairlift.lab.report.compare import WasteShares, waste_shares
from chairlift.lab.report.memory import KINDS
from chairlift.lab.report.run_log import recorded_run


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One policy in one round.

    Attributes:
        memory: mean shares of the pool by kind over the steps that left requests waiting, with the true lengths;
            `metrics.memory` is over all steps, by `max_tokens`.
    """

    metrics: RunMetrics
    memory: WasteShares
    step_speeds: StepSpeeds

    @classmethod
    def of(cls, events: Sequence[Event]) -> PolicyRun:
        """From all events of one run, the engine's start first."""
        run = recorded_run(events)
        return cls(run.metrics, waste_shares(run), step_speeds(run.trace))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; without the single steps."""
        true_lengths = {**self.memory.shares, "while_requests_wait": self.memory.is_saturated}
        return {**self.metrics.to_dict(), "memory_true_lengths": true_lengths}


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """What, in which unit (after `scale`), where a run has it, and whether its multiple means something."""

    key: str
    label: str
    unit: str
    value: Callable[[PolicyRun], float | None]
    scale: float = 1.0
    has_multiple: bool = False


def _metric(key: str, has_multiple: bool = False) -> ComparedFigure:
    figure = next(figure for figure in REPORTED_METRICS if figure.key == key)
    return ComparedFigure(
        key, figure.label, figure.unit, lambda run: figure.value(run.metrics), figure.scale, has_multiple
    )


def _share(kind: str) -> ComparedFigure:
    figure = _metric(kind)
    return ComparedFigure(kind, figure.label, figure.unit, lambda run: run.memory.shares[kind], figure.scale)


COMPARED: Final = (
    _metric("output_tokens_per_s", has_multiple=True),
    _metric("total_tokens_per_s", has_multiple=True),
    _metric("e2e_latency_p50", has_multiple=True),
    _metric("e2e_latency_p99", has_multiple=True),
    _metric("ttft_p50", has_multiple=True),
    _metric("ttft_p99", has_multiple=True),
    _metric("mean_batch_size"),
    _metric("mean_batch_tokens"),
    *(_share(kind) for kind in KINDS),
    _metric("padding_tokens"),
    _metric("recomputed_tokens"),
    _metric("preemptions"),
)


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Over the rounds; None if a round has no value."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Spread(median(known), min(known), max(known))


def figure_spread(figure: ComparedFigure, runs: Sequence[PolicyRun]) -> Spread | None:
    """The figure over the rounds of a policy, unscaled."""
    return spread_of([figure.value(run) for run in runs])


def multiple_spread(figure: ComparedFigure, runs: Sequence[PolicyRun], first: Sequence[PolicyRun]) -> Spread | None:
    """How many times the first policy's value the figure is: a ratio a round, so that what slows the machine for a
    while slows both sides of it."""
    ratios: list[float | None] = []
    for run, base in zip(runs, first, strict=True):
        value, base_value = figure.value(run), figure.value(base)
        ratios.append(None if value is None or not base_value else value / base_value)
    return spread_of(ratios)


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """The first output token that two policies do not agree on."""

    round: int
    request_id: str
    policy: str
    position: int


@dataclass(slots=True)
class TokenCheck:
    """Whether every policy gave every request the same tokens. `num_same`: requests of all rounds for which they did.

    Policies change what is computed together, and nothing else, so greedy tokens may differ only where rounding does:
    two tokens all but equally likely, or a type with few digits.
    """

    num_requests: int = 0
    num_same: int = 0
    first_difference: TokenDifference | None = None

    @property
    def is_same(self) -> bool:
        return self.num_same == self.num_requests

    def take(self, number: int, tokens: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Compare one round: the output tokens by policy and request."""
        (_, first), *others = tokens.items()
        for request_id, expected in first.items():
            self.num_requests += 1
            for policy, answers in others:
                if answers[request_id] != expected:
                    pairs = zip(answers[request_id], expected, strict=True)
                    position = next(i for i, (token, other) in enumerate(pairs) if token != other)
                    self.first_difference = self.first_difference or TokenDifference(
                        number, request_id, policy, position
                    )
                    break
            else:
                self.num_same += 1
