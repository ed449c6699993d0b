"""The numbers of runs, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.report.compare import variation
from chairlift.lab.report.run_log import RecordedRun


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: `value` gives the text of a run."""

    label: str
    value: Callable[[RecordedRun], str]


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: Sequence[Row]


def number(value: float) -> str:
    """Three or more significant digits, without an exponent."""
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
    others = {"unfinished": metrics.num_unfinished, "refused": metrics.num_rejected}
    others["ended otherwise"] = metrics.num_requests - metrics.num_answered - metrics.num_unfinished
    return ", ".join([f"{metrics.num_answered} answered", *(f"{n} {name}" for name, n in others.items() if n)])


def _kv(run: RecordedRun) -> str:
    arena = f" out of a {run.started.kv_arena} arena" if run.started.kv_arena else ""
    cache = ", prefix cache" if run.started.enable_prefix_caching else ""
    return f"{run.started.kv}{arena}{cache}"


def _pool(run: RecordedRun) -> str:
    started = run.started
    return f"{run.trace.num_slots:,} slots ({started.num_blocks:,} blocks of {started.block_size})"


def _recomputed(run: RecordedRun) -> str:
    return _share_of_computed(run, sum(step.num_recomputed for step in run.trace.steps))


SECTIONS: tuple[Section, ...] = (
    Section(
        "engine",
        (
            Row("event log", lambda run: run.source or "none"),
            Row("model", lambda run: run.started.model),
            Row("batching", lambda run: run.started.batching),
            Row("KV memory", _kv),
            Row("KV pool", _pool),
            Row("seats", lambda run: number(run.num_seats)),
            Row("max_num_batched_tokens", lambda run: number(run.started.max_num_batched_tokens)),
            Row("max_model_len", lambda run: number(run.started.max_model_len)),
        ),
    ),
    Section(
        "load",
        (
            Row("requests", _requests),
            Row("arrivals", lambda run: run.arrivals),
            Row("prompt tokens", lambda run: number(run.metrics.prompt_tokens)),
            Row("output tokens", lambda run: number(run.metrics.output_tokens)),
            Row("output length, mean", _lengths),
        ),
    ),
    Section(
        "result",
        (
            Row("duration", lambda run: f"{number(run.metrics.duration)} s"),
            Row("output tokens/s", lambda run: number(run.metrics.output_tokens_per_s)),
            Row("prompt and output tokens/s", lambda run: number(run.metrics.total_tokens_per_s)),
            Row("requests/s", lambda run: number(run.metrics.requests_per_s)),
            Row("TTFT p50 / p99", lambda run: _seconds(run.metrics.ttft)),
            Row("ITL p50 / p99", lambda run: "none" if run.is_static else _seconds(run.metrics.itl)),
            Row("E2E latency p50 / p99", lambda run: _seconds(run.metrics.e2e_latency)),
            Row("steps", lambda run: number(run.metrics.num_steps)),
            Row("batch, mean / peak", lambda run: f"{run.metrics.mean_batch_size:.1f} / {run.metrics.peak_batch_size}"),
            Row("padding tokens", lambda run: _share_of_computed(run, _padding(run))),
            Row("recomputed tokens", _recomputed),
            Row("preemptions", lambda run: number(run.metrics.preemptions)),
            Row("KV blocks held, mean", lambda run: _or_none(run.metrics.kv_use_mean, " %", 100)),
            Row("KV blocks held, peak", lambda run: _or_none(run.metrics.kv_use_peak, " %", 100)),
        ),
    ),
)
