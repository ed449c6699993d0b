"""Results for people: tables; and, as the last line, one JSON object for programs."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.latency import LatencyResult
from chairlift.lab.bench.machine import MachineFacts
from chairlift.lab.bench.text import json_line, load_arrivals, load_lengths, number
from chairlift.lab.bench.throughput import Spread, ThroughputResult
from chairlift.lab.metrics.reported_metrics import REPORTED_METRICS, ReportedMetric


def print_result(result: ThroughputResult, file: TextIO | None = None) -> None:
    """Write the table, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    Console(file=out).print(throughput_table(result))
    out.write(json_line(result.to_dict()))


def throughput_table(result: ThroughputResult) -> Table:
    """Median and range of every metric that the runs have."""
    table = Table(title=_title(result), caption=_caption(result), title_justify="left", caption_justify="left")
    table.add_column("")
    for column in ("median", "min", "max"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for metric in REPORTED_METRICS:
        if (spread := result.spread(metric)) is not None:
            table.add_row(metric.label, *_cells(metric, spread), metric.unit)
    return table


def print_latency(result: LatencyResult, file: TextIO | None = None) -> None:
    """Write the table, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    Console(file=out).print(latency_table(result))
    out.write(json_line(result.to_dict()))


def latency_table(result: LatencyResult) -> Table:
    """How the phases of a batch are distributed over the iterations."""
    options = result.options
    title = (
        f"{result.engine.model}: one batch of {options.batch_size} requests, "
        f"{options.input_len} prompt and {options.output_len} output tokens each"
    )
    table = Table(title=title, caption=_caption(result), title_justify="left", caption_justify="left")
    table.add_column("")
    for column in ("mean", "median", "p90", "p99", "min", "max", "unit"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    rows = (
        ("latency", result.latency, 1.0, "s"),
        ("prefill", result.prefill, 1e3, "ms"),
        ("decode", result.decode_per_token, 1e3, "ms"),
    )
    for label, distribution, scale, unit in rows:
        if distribution is not None:
            values = distribution.to_dict()
            cells = [number(values[key] * scale) for key in ("mean", "median", "p90", "p99", "min", "max")]
            table.add_row(label, *cells, unit)
    return table


def _cells(metric: ReportedMetric, spread: Spread) -> list[str]:
    return [number(value * metric.scale) for value in (spread.median, spread.min, spread.max)]


def _title(result: ThroughputResult) -> str:
    run = result.runs[0]
    return (
        f"{result.engine.model}: {run.num_requests} requests {load_arrivals(result.options)}, "
        f"{run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens, {len(result.runs)} runs"
    )


def machine_caption(machine: MachineFacts, peak_rss_bytes: int | None) -> str:
    """Two lines: the machine, the versions."""
    memory = f"{machine.memory_bytes / (1 << 30):.0f} GiB"
    rss = "" if peak_rss_bytes is None else f", peak RSS {peak_rss_bytes / (1 << 20):,.0f} MiB"
    return (
        f"{machine.cpu}, {machine.num_threads} threads on {machine.num_cores} cores, {memory}{rss}\n"
        f"chairlift {machine.chairlift}, torch {machine.torch}, Python {machine.python}"
    )


def _caption(result: ThroughputResult | LatencyResult) -> str:
    engine = result.engine
    return (
        f"{machine_caption(result.machine, result.peak_rss_bytes)}\n"
        f"{engine.batching} batching, kv {engine.kv}, KV pool {engine.num_blocks} blocks of {engine.block_size}, "
        f"max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens {engine.max_num_batched_tokens}, "
        f"max_model_len {engine.max_model_len}, prefix cache {'on' if engine.enable_prefix_caching else 'off'}\n"
        f"{_workload(result)}"
    )


def _workload(result: ThroughputResult | LatencyResult) -> str:
    if isinstance(result, ThroughputResult):
        return load_lengths(result.options)
    warm_up = result.options.num_iters_warmup
    return f"{len(result.iterations)} iterations after {warm_up} to warm up; decode: each token after the prefill"
