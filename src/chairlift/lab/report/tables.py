"""The rows of the table of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.report.compare import variation
from chairlift.lab.report.run_log import RecordedRun


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the table; `value` returns the text of a run."""

    label: str
    value: Callable[[RecordedRun], str]


@dataclass(frozen=True, slots=True)
class TableSection:
    """A part of the table with its title."""

    title: str
    rows: Sequence[TableRow]


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


def _recomputed(run: RecordedRun) -> str:
    return _share_of_computed(run, sum(step.num_recomputed for step in run.trace.steps))


SECTIONS: tuple[TableSection, ...] = (
    TableSection(
        "engine",
        (
            TableRow("event log", lambda run: run.source or "none"),
            TableRow("model", lambda run: run.started.model),
            TableRow("batching", lambda run: run.started.batching),
            TableRow("KV memory", _kv),
            TableRow("KV pool", _pool),
            TableRow("seats", lambda run: number(run.num_seats)),
            TableRow("max_num_batched_tokens", lambda run: number(run.started.max_num_batched_tokens)),
            TableRow("max_model_len", lambda run: number(run.started.max_model_len)),
        ),
    ),
    TableSection(
        "load",
        (
            TableRow("requests", _requests),
            TableRow("arrivals", lambda run: run.arrivals),
            TableRow("prompt tokens", lambda run: number(run.metrics.prompt_tokens)),
            TableRow("output tokens", lambda run: number(run.metrics.output_tokens)),
            TableRow("output length, mean", _lengths),
        ),
    ),
    TableSection(
        "result",
        (
            TableRow("duration", lambda run: f"{number(run.metrics.duration)} s"),
            TableRow("output tokens/s", lambda run: number(run.metrics.output_tokens_per_s)),
            TableRow("prompt and output tokens/s", lambda run: number(run.metrics.total_tokens_per_s)),
            TableRow("requests/s", lambda run: number(run.metrics.requests_per_s)),
            TableRow("TTFT p50 / p99", lambda run: _seconds(run.metrics.ttft)),
            TableRow("ITL p50 / p99", lambda run: "none" if run.is_static else _seconds(run.metrics.itl)),
            TableRow("E2E latency p50 / p99", lambda run: _seconds(run.metrics.e2e_latency)),
            TableRow("steps", lambda run: number(run.metrics.num_steps)),
            TableRow(
                "batch, mean / peak", lambda run: f"{run.metrics.mean_batch_size:.1f} / {run.metrics.peak_batch_size}"
            ),
            TableRow("padding tokens", lambda run: _share_of_computed(run, _padding(run))),
            TableRow("recomputed tokens", _recomputed),
            TableRow("preemptions", lambda run: number(run.metrics.preemptions)),
            TableRow("KV blocks held, mean", lambda run: _or_none(run.metrics.kv_use_mean, " %", 100)),
            TableRow("KV blocks held, peak", lambda run: _or_none(run.metrics.kv_use_peak, " %", 100)),
        ),
    ),
)
