"""The result of `bench serve` for people; and, as the last line, one JSON object for programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table

from chairlift.errors import ConfigError
from chairlift.lab.bench.serving.benchmark import ServeResult
from chairlift.lab.bench.serving.metrics import LATENCIES, ServeMetrics
from chairlift.lab.bench.text import json_line, load_arrivals, load_lengths, number


def print_serve(result: ServeResult, file: TextIO | None = None) -> None:
    """Write the tables, the notes, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    console = Console(file=out, markup=False, highlight=False)
    arrivals = load_arrivals(result.options)
    console.print(
        f"{result.model} at {result.options.base_url}: {len(result.calls)} requests {arrivals}", soft_wrap=True
    )
    console.print(_totals_table(result.metrics))
    console.print(_latency_table(result))
    for note in notes(result):
        console.print(note, soft_wrap=True)
    out.write(json_line(result.to_dict()))


def save(result: ServeResult, path: Path) -> None:
    """Write the result and every call as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json_line(result.to_detailed_dict()), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"save_result={path}: {error.strerror}") from None


def _totals_table(metrics: ServeMetrics) -> Table:
    table = Table(show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("")
    rows: list[tuple[str, float | None, str]] = [
        ("completed", metrics.completed, ""),
        ("failed", metrics.failed, ""),
        ("duration", metrics.duration, "s"),
        ("prompt tokens", metrics.total_input_tokens, ""),
        ("output tokens", metrics.total_output_tokens, ""),
        ("requests", metrics.request_throughput, "/s"),
        ("goodput", metrics.request_goodput, "/s"),
        ("output tokens", metrics.output_throughput, "/s"),
        ("prompt and output tokens", metrics.total_token_throughput, "/s"),
        ("concurrency, mean", metrics.mean_concurrent_requests, "requests"),
        ("concurrency, peak", metrics.max_concurrent_requests, "requests"),
    ]
    for label, value, unit in rows:
        if value is not None:
            table.add_row(label, number(value), unit)
    return table


def _latency_table(result: ServeResult) -> Table:
    percents = [f"p{percent:g}" for percent in result.options.metric_percentiles]
    table = Table()
    table.add_column("ms")
    for column in ("mean", "median", *percents, "max"):
        table.add_column(column, justify="right")
    rows = [(LATENCIES[name], result.metrics.latencies[name]) for name in result.options.percentile_metrics]
    for label, distribution in [*rows, ("send lag", result.metrics.send_lag)]:
        if distribution is not None:
            values = distribution.to_dict()
            table.add_row(label, *(number(values[key] * 1e3) for key in ("mean", "median", *percents, "max")))
    return table


def notes(result: ServeResult) -> list[str]:
    """What to know about the numbers, a line each."""
    options, metrics, client = result.options, result.metrics, result.client
    lines = [f"failed, {f.kind}: {f.count}, the first one: {f.first_message}" for f in metrics.failures]
    lines.append("latencies count from when a request was sent; send lag is how much later than due that was")
    if metrics.num_chunks:
        per_chunk = metrics.total_output_tokens / metrics.num_chunks
        lines.append(f"ITL is the gap between chunks, which hold {per_chunk:.3g} tokens on average")
    by_chunks = metrics.completed - metrics.num_counted_by_usage
    by_server = metrics.num_counted_by_usage
    lines.append(f"output tokens: counted by the server in {by_server} answers, by chunks in {by_chunks}")
    if metrics.total_input_tokens != metrics.requested_input_tokens:
        asked, counted = metrics.requested_input_tokens, metrics.total_input_tokens
        lines.append(f"prompt tokens: asked for {asked:,}, counted {counted:,}")
    if metrics.num_short:
        lines.append(f"{metrics.num_short} answers are shorter than asked for")
    if metrics.num_unstreamed:
        lines.append(f"{metrics.num_unstreamed} answers came in one piece: they have no ITL and no TPOT")
    if result.prompt_format == "text" and options.backend == "openai":
        lines.append("the server refused token ids: prompts were sent as text of about that many tokens")
    lines.append(load_lengths(options))
    memory = f"{client.memory_bytes / (1 << 30):.0f} GiB"
    lines.append(f"client: {client.cpu}, {client.num_cores} cores, {memory}; chairlift {client.chairlift}")
    return lines
