"""The rows of the table of runs."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.report.compare import variation
from chairlift.lab.report.run_log import RecordedRun


def number(value: float) -> str:
    """A number with at least three significant digits and without an exponent."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _or_none(value: float | None, unit: str = "", scale: float = 1.0) -> str:
    return "none" if value is None else number(value * scale) + unit


def _seconds(summary: Summary | None) -> str:
    if summary is None:
        return "none"
    return f"{number(summary.p50)} / {number(summary.p99)} s"


def _padding(run: RecordedRun) -> int:
    return sum(sum(step.num_padding) for step in run.trace.steps)


def _share_of_computed(run: RecordedRun, tokens: int) -> str:
    computed = _padding(run) + sum(sum(step.num_scheduled) for step in run.trace.steps)
    return f"{tokens:,} ({100 * tokens / computed:.1f} %)" if tokens else "0"


def _lengths(run: RecordedRun) -> str:
    cv = variation(run.output_lengths)
    return "none" if cv is None else f"{number(sum(run.output_lengths) / len(run.output_lengths))}, CV {cv:.2f}"


def _requests(run: RecordedRun) -> str:
    metrics = run.metrics
    others = {"unfinished": metrics.num_unfinished, "rejected": metrics.num_rejected}
    others["aborted or failed"] = metrics.num_requests - metrics.num_answered - metrics.num_unfinished
    return ", ".join([f"{metrics.num_answered} answered", *(f"{n} {name}" for name, n in others.items() if n)])


def _kv(run: RecordedRun) -> str:
    arena = f" out of a {run.started.kv_arena} arena" if run.started.kv_arena else ""
    cache = ", prefix cache" if run.started.enable_prefix_caching else ""
    return f"{run.started.kv}{arena}{cache}"


def _pool(run: RecordedRun) -> str:
    started = run.started
    return f"{run.trace.num_slots:,} slots ({started.num_blocks:,} blocks of {started.block_size})"


SECTIONS: dict[str, dict[str, Callable[[RecordedRun], str]]] = {
    "engine": {
        "event log": lambda run: run.source or "none",
        "model": lambda run: run.started.model,
        "batching": lambda run: run.started.batching,
        "KV memory": _kv,
        "KV pool": _pool,
        "seats": lambda run: number(run.num_seats),
        "max_num_batched_tokens": lambda run: number(run.started.max_num_batched_tokens),
        "max_model_len": lambda run: number(run.started.max_model_len),
    },
    "load": {
        "requests": _requests,
        "arrivals": lambda run: run.arrivals,
        "prompt tokens": lambda run: number(run.metrics.prompt_tokens),
        "output tokens": lambda run: number(run.metrics.output_tokens),
        "output length, mean": _lengths,
    },
    "result": {
        "duration": lambda run: f"{number(run.metrics.duration)} s",
        "output tokens/s": lambda run: number(run.metrics.output_tokens_per_s),
        "prompt and output tokens/s": lambda run: number(run.metrics.total_tokens_per_s),
        "requests/s": lambda run: number(run.metrics.requests_per_s),
        "TTFT p50 / p99": lambda run: _seconds(run.metrics.ttft),
        "ITL p50 / p99": lambda run: "none" if run.is_static else _seconds(run.metrics.itl),
        "E2E latency p50 / p99": lambda run: _seconds(run.metrics.e2e_latency),
        "steps": lambda run: number(run.metrics.num_steps),
        "batch, mean / peak": lambda run: f"{run.metrics.mean_batch_size:.1f} / {run.metrics.peak_batch_size}",
        "padding tokens": lambda run: _share_of_computed(run, _padding(run)),
        "recomputed tokens": lambda run: _share_of_computed(run, sum(s.num_recomputed for s in run.trace.steps)),
        "preemptions": lambda run: number(run.metrics.preemptions),
        "KV blocks held, mean": lambda run: _or_none(run.metrics.kv_use_mean, " %", 100),
        "KV blocks held, peak": lambda run: _or_none(run.metrics.kv_use_peak, " %", 100),
    },
}
"""The text of each row of the table, by section and label."""
