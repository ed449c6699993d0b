"""The figures of a run that reports show, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.metrics.run import RunMetrics


@dataclass(frozen=True, slots=True)
class Figure:
    """What, in which unit (after `scale`), and where a run has it."""

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


FIGURES: Final = (
    Figure("output_tokens_per_s", "output tokens", "/s", lambda run: run.output_tokens_per_s),
    Figure("total_tokens_per_s", "prompt and output tokens", "/s", lambda run: run.total_tokens_per_s),
    Figure("requests_per_s", "requests", "/s", lambda run: run.requests_per_s),
    Figure("e2e_latency_p50", "E2E latency p50", "s", _p(50, lambda run: run.e2e_latency)),
    Figure("e2e_latency_p99", "E2E latency p99", "s", _p(99, lambda run: run.e2e_latency)),
    Figure("normalized_latency_mean", "E2E latency by output token, mean", "s", _normalized_latency),
    Figure("ttft_p50", "TTFT p50", "s", _p(50, lambda run: run.ttft)),
    Figure("ttft_p99", "TTFT p99", "s", _p(99, lambda run: run.ttft)),
    Figure("itl_p50", "ITL p50", "ms", _p(50, lambda run: run.itl), 1e3),
    Figure("itl_p99", "ITL p99", "ms", _p(99, lambda run: run.itl), 1e3),
    Figure("mean_batch_size", "batch, mean", "requests", lambda run: run.mean_batch_size),
    Figure("mean_batch_tokens", "step, mean", "tokens", lambda run: run.mean_batch_tokens),
    Figure("kv_use_mean", "KV blocks held, mean over steps", "%", lambda run: run.kv_use_mean, 100),
    Figure("kv_use_peak", "KV blocks held, peak", "%", lambda run: run.kv_use_peak, 100),
    Figure("token_states", "KV slots with token states", "%", _share("token_states"), 100),
    Figure("reserved", "KV slots reserved", "%", _share("reserved"), 100),
    Figure("internal", "KV slots, internal fragmentation", "%", _share("internal"), 100),
    Figure("external", "KV slots, external fragmentation", "%", _share("external"), 100),
    Figure("free", "KV slots free", "%", _share("free"), 100),
    Figure("preemptions", "preemptions", "", lambda run: run.preemptions),
    Figure("recomputed_tokens", "tokens computed again after preemption", "", lambda run: run.recomputed_tokens),
    Figure("padding_tokens", "padding tokens computed", "", lambda run: run.padding_tokens),
    Figure("cached_tokens", "prompt tokens from the prefix cache", "", lambda run: run.cached_tokens),
)
