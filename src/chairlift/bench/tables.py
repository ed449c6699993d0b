"""Results for people: tables; and, as the last line, one JSON object for programs."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from chairlift.bench.throughput import FIGURES, Figure, Spread, ThroughputResult


def print_result(result: ThroughputResult, file: TextIO | None = None) -> None:
    """Write the table, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    Console(file=out).print(throughput_table(result))
    out.write(json.dumps(result.to_dict()) + "\n")


def throughput_table(result: ThroughputResult) -> Table:
    """Median and range of every figure that the runs have."""
    table = Table(title=_title(result), caption=_caption(result), title_justify="left", caption_justify="left")
    table.add_column("")
    for column in ("median", "min", "max"):
        table.add_column(column, justify="right")
    table.add_column("unit")
    for figure in FIGURES:
        if (spread := result.spread(figure)) is not None:
            table.add_row(figure.label, *_cells(figure, spread), figure.unit)
    return table


def _cells(figure: Figure, spread: Spread) -> list[str]:
    return [_number(value * figure.scale) for value in (spread.median, spread.min, spread.max)]


def _number(value: float) -> str:
    """Three or more significant digits, without an exponent."""
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def _title(result: ThroughputResult) -> str:
    options, run = result.options, result.runs[0]
    rate = "at once" if options.request_rate is None else f"at {options.request_rate:g}/s"
    return (
        f"{result.engine.model}: {options.num_prompts} requests {rate}, "
        f"{run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens, {len(result.runs)} runs"
    )


def _caption(result: ThroughputResult) -> str:
    machine, engine = result.machine, result.engine
    memory = f"{machine.memory_bytes / (1 << 30):.0f} GiB"
    rss = "" if result.peak_rss_bytes is None else f", peak RSS {result.peak_rss_bytes / (1 << 20):,.0f} MiB"
    return (
        f"{machine.cpu}, {machine.num_threads} threads on {machine.num_cores} cores, {memory}{rss}\n"
        f"KV pool {engine.num_blocks} blocks of {engine.block_size}, max_num_seqs {engine.max_num_seqs}, "
        f"max_num_batched_tokens {engine.max_num_batched_tokens}, max_model_len {engine.max_model_len}, "
        f"prefix cache {'on' if engine.enable_prefix_caching else 'off'}\n"
        f"prompt {result.options.prompt_len}, output {result.options.output_len}, seed {result.options.seed}"
    )
