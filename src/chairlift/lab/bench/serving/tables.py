"""The report of `chairlift bench serve`: totals, latencies and notes."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table

from chairlift.errors import ConfigError
from chairlift.lab.bench.serving.benchmark import TEXT, ServeResult
from chairlift.lab.bench.serving.metrics import LATENCIES, ServeMetrics
from chairlift.lab.bench.workload_options import format_arrivals, format_lengths
from chairlift.lab.tables import json_line, make_table, number, print_report


def print_serve(result: ServeResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write the tables and the notes, or the JSON line, to `file` (standard output if None)."""
    arrivals = format_arrivals(result.options)
    title = f"{result.model} at {result.options.base_url}: {len(result.records)} requests {arrivals}"
    parts: list[RenderableType] = [title, _totals_table(result.metrics), _latency_table(result), *notes(result)]
    print_report(parts, result.to_dict(), file, as_json)


def save_result(result: ServeResult, path: Path) -> None:
    """Write the result and the record of every request as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json_line(result.to_detailed_dict()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"save_result={path}: {error.strerror}") from None


def _totals_table(metrics: ServeMetrics) -> Table:
    table = make_table("", ["", "total"])
    rows: list[tuple[str, float | None]] = [
        ("completed requests", metrics.completed),
        ("failed requests", metrics.failed),
        ("duration, s", metrics.duration),
        ("prompt tokens", metrics.total_input_tokens),
        ("output tokens", metrics.total_output_tokens),
        ("requests/s", metrics.request_throughput),
        ("goodput, requests/s", metrics.request_goodput),
        ("output tokens/s", metrics.output_throughput),
        ("prompt and output tokens/s", metrics.total_token_throughput),
        ("concurrent requests, mean", metrics.mean_concurrent_requests),
        ("concurrent requests, maximum", metrics.max_concurrent_requests),
    ]
    for label, value in rows:
        if value is not None:
            table.add_row(label, number(value))
    return table


def _latency_table(result: ServeResult) -> Table:
    columns = ["mean", "median", *(f"p{percent:g}" for percent in result.options.metric_percentiles), "max"]
    table = make_table("", ["ms", *columns])
    rows = [(LATENCIES[name], result.metrics.latencies[name]) for name in result.options.percentile_metrics]
    for label, distribution in [*rows, ("send lag", result.metrics.send_lag)]:
        if distribution is not None:
            values = distribution.to_dict()
            table.add_row(label, *(number(values[column] * 1e3) for column in columns))
    return table


def notes(result: ServeResult) -> list[str]:
    """Explanations of the figures, one to a line."""
    options, metrics, client = result.options, result.metrics, result.client
    lines = [
        f"failed with {failure.kind}: {failure.count} requests; the first message: {failure.first_message}"
        for failure in metrics.failures
    ]
    lines.append("latencies are measured from the sending of a request; send lag is the delay of the client before it")
    if metrics.num_chunks:
        per_chunk = metrics.total_output_tokens / metrics.num_chunks
        lines.append(f"ITL is the time between chunks, which have {per_chunk:.3g} tokens on average")
    by_server = metrics.num_counted_by_usage
    lines.append(
        f"output tokens: counted by the server in {by_server} answers, by chunks in {metrics.completed - by_server}"
    )
    if metrics.total_input_tokens != metrics.requested_input_tokens:
        requested, counted = metrics.requested_input_tokens, metrics.total_input_tokens
        lines.append(f"prompt tokens: {requested:,} requested, {counted:,} counted by the server")
    if metrics.num_short:
        lines.append(f"{metrics.num_short} answers are shorter than requested")
    if metrics.num_unstreamed:
        lines.append(f"{metrics.num_unstreamed} answers arrived in one chunk: they have no ITL and no TPOT")
    if result.prompt_format == TEXT:
        lines.append("the server rejected token ids: prompts were sent as text of about as many tokens")
    lines.append(format_lengths(options))
    memory = f"{client.memory_bytes / (1 << 30):.0f} GiB"
    lines.append(f"client: {client.cpu}, {client.num_cores} cores, {memory}; chairlift {client.chairlift}")
    return lines
