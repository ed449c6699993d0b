"""The metrics of a run that benchmarks and simulations print, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.metrics.run import RunMetrics


@dataclass(frozen=True, slots=True)
class ReportedMetric:
    """A metric of a run: its label, the unit of the value after scaling, and the function that returns the value."""

    key: str
    label: str
    unit: str
    value: Callable[[RunMetrics], float | None]
    scale: float = 1.0


def _p(percent: int, summary: Callable[[RunMetrics], Summary | None]) -> Callable[[RunMetrics], float | None]:
    return lambda run: None if (s := summary(run)) is None else float(getattr(s, f"p{percent}"))


def _normalized_latency(run: RunMetrics) -> float | None:
    return None if run.normalized_latency is None else run.normalized_latency.mean


def _share(kind: str) -> Callable[[RunMetrics], float | None]:
    return lambda run: None if run.memory is None else float(getattr(run.memory, kind))


REPORTED_METRICS: Final = (
    ReportedMetric("output_tokens_per_s", "output tokens", "/s", lambda run: run.output_tokens_per_s),
    ReportedMetric("total_tokens_per_s", "prompt and output tokens", "/s", lambda run: run.total_tokens_per_s),
    ReportedMetric("requests_per_s", "requests", "/s", lambda run: run.requests_per_s),
    ReportedMetric("e2e_latency_p50", "E2E latency p50", "s", _p(50, lambda run: run.e2e_latency)),
    ReportedMetric("e2e_latency_p99", "E2E latency p99", "s", _p(99, lambda run: run.e2e_latency)),
    ReportedMetric("normalized_latency_mean", "E2E latency by output token, mean", "s", _normalized_latency),
    ReportedMetric("ttft_p50", "TTFT p50", "s", _p(50, lambda run: run.ttft)),
    ReportedMetric("ttft_p99", "TTFT p99", "s", _p(99, lambda run: run.ttft)),
    ReportedMetric("itl_p50", "ITL p50", "ms", _p(50, lambda run: run.itl), 1e3),
    ReportedMetric("itl_p99", "ITL p99", "ms", _p(99, lambda run: run.itl), 1e3),
    ReportedMetric("mean_batch_size", "batch, mean", "requests", lambda run: run.mean_batch_size),
    ReportedMetric("mean_batch_tokens", "step, mean", "tokens", lambda run: run.mean_batch_tokens),
    ReportedMetric("kv_use_mean", "KV blocks held, mean over steps", "%", lambda run: run.kv_use_mean, 100),
    ReportedMetric("kv_use_peak", "KV blocks held, peak", "%", lambda run: run.kv_use_peak, 100),
    ReportedMetric("token_states", "KV slots with token states", "%", _share("token_states"), 100),
    ReportedMetric("reserved", "KV slots reserved", "%", _share("reserved"), 100),
    ReportedMetric("internal", "KV slots, internal fragmentation", "%", _share("internal"), 100),
    ReportedMetric("external", "KV slots, external fragmentation", "%", _share("external"), 100),
    ReportedMetric("free", "KV slots free", "%", _share("free"), 100),
    ReportedMetric("preemptions", "preemptions", "", lambda run: run.preemptions),
    ReportedMetric(
        "recomputed_tokens", "tokens computed again after preemption", "", lambda run: run.recomputed_tokens
    ),
    ReportedMetric("padding_tokens", "padding tokens computed", "", lambda run: run.padding_tokens),
    ReportedMetric("cached_tokens", "prompt tokens from the prefix cache", "", lambda run: run.cached_tokens),
)
