"""Computes the figures of a run from the times of its tokens, in the same way for every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

import numpy as np
from benchmarks.peers.records import EngineRun, Job, PeerRequest, RequestTiming, RequestTimings

from chairlift.errors import ChairliftError
from chairlift.lab.metrics.run import ReportedMetric

FIGURES: Final = (
    ReportedMetric("prompt_tokens_per_s", "prompt: prefill", "tokens/s"),
    ReportedMetric("output_tokens_per_s", "burst: output", "tokens/s"),
    ReportedMetric("e2e_p50", "burst: E2E p50", "s"),
    ReportedMetric("e2e_p99", "burst: E2E p99", "s"),
    ReportedMetric("ttft_p50", "burst: TTFT p50", "s"),
    ReportedMetric("ttft_p99", "burst: TTFT p99", "s"),
    ReportedMetric("itl_p50", "burst: ITL p50", "ms", 1e3),
    ReportedMetric("itl_p99", "burst: ITL p99", "ms", 1e3),
    ReportedMetric("single_decode_tokens_per_s", "single: decode", "tokens/s"),
    ReportedMetric("single_ttft", "single: TTFT", "s"),
    ReportedMetric("peak_rss_bytes", "peak RSS", "MiB", 1 / (1 << 20)),
)
"""Higher is better for rates, and lower for all others."""


class WrongLengthError(ChairliftError):
    """Raised if an engine did not generate the forced number of tokens, which makes its speed meaningless."""


def check_lengths(label: str, job: Job, run: EngineRun) -> None:
    """Check that every request has exactly the forced number of tokens.

    Raises:
        WrongLengthError: a request has another number. The message names the first one.
    """
    for requests, timings in ((job.prompt, run.prompt), (job.burst, run.burst), (job.single, run.single)):
        for request in requests:
            _check_length(label, request, timings.get(request.request_id))


def _check_length(label: str, request: PeerRequest, timing: RequestTiming | None) -> None:
    got = 0 if timing is None else len(timing.token_times)
    if got != request.output_len:
        raise WrongLengthError(
            f"{label}: request {request.request_id} ({len(request.prompt_token_ids)} prompt tokens) gave {got} output "
            f"tokens instead of the forced {request.output_len}: the run is invalid"
        )


def run_figures(run: EngineRun, prompt_len: int) -> dict[str, float]:
    """The values of a run by the keys of FIGURES, without those that the run does not have.

    Args:
        prompt_len: number of prompt tokens of each request in `run.prompt`.
    """
    values = {"peak_rss_bytes": float(run.peak_rss_bytes)}
    if run.prompt:
        seconds = median(timing.token_times[0] - timing.sent for timing in run.prompt.values())
        values["prompt_tokens_per_s"] = prompt_len / seconds
    if run.burst:
        values |= _burst_figures(run.burst)
    if run.single:
        values |= _single_figures(run.single)
    return values


def _burst_figures(timings: RequestTimings) -> dict[str, float]:
    all_timings = list(timings.values())
    start = min(timing.sent for timing in all_timings)
    seconds = max(timing.token_times[-1] for timing in all_timings) - start
    samples: dict[str, list[float]] = {"e2e": [timing.token_times[-1] - timing.sent for timing in all_timings]}
    if all(timing.is_streamed for timing in all_timings):
        samples["ttft"] = [timing.token_times[0] - timing.sent for timing in all_timings]
        samples["itl"] = [b - a for timing in all_timings for a, b in pairwise(timing.token_times)]
    tokens = sum(len(timing.token_times) for timing in all_timings)
    rates = {"output_tokens_per_s": tokens / seconds}
    points = {
        f"{name}_p{p}": float(np.percentile(values, p)) for name, values in samples.items() if values for p in (50, 99)
    }
    return rates | points


def _single_figures(timings: RequestTimings) -> dict[str, float]:
    streamed = [timing for timing in timings.values() if timing.is_streamed and len(timing.token_times) > 1]
    if not streamed:
        return {}
    speeds = [(len(t.token_times) - 1) / (t.token_times[-1] - t.token_times[0]) for t in streamed]
    return {
        "single_decode_tokens_per_s": median(speeds),
        "single_ttft": median(t.token_times[0] - t.sent for t in streamed),
    }


@dataclass(frozen=True, slots=True)
class FigureComparison:
    """One figure over the rounds: ours[i] and theirs[i] belong to neighbouring runs."""

    figure: ReportedMetric
    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        """The ratio of Chairlift to the peer in each round."""
        return [ours / theirs for ours, theirs in zip(self.ours, self.theirs, strict=True)]


def compare(rounds: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[FigureComparison]:
    """The figures that both engines have in every round, in the order of FIGURES; `rounds`: (ours, theirs)."""
    return [
        FigureComparison(figure, [ours[figure.key] for ours, _ in rounds], [theirs[figure.key] for _, theirs in rounds])
        for figure in FIGURES
        if all(figure.key in values for pair in rounds for values in pair)
    ]
