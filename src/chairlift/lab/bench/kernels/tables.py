"""The speed of kernels for people: tables; and, as the last line, one JSON object for programs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.kernels.benchmark import KernelResult, KernelTime
from chairlift.lab.bench.kernels.ceilings import GEMM_SIZE, Ceilings
from chairlift.lab.bench.kernels.instructions import InstructionCount
from chairlift.lab.bench.kernels.passes import LAYERS, SamplingPass
from chairlift.lab.bench.tables import machine_caption
from chairlift.lab.bench.text import json_line, number
from chairlift.models.declaration import LM_HEAD

MILLI: Final = ("ms", 1e3)
MICRO: Final = ("µs", 1e6)

RATES: Final = (
    "The ceiling is the vector units (c) or reading memory (m), whichever takes longer, as they were the moment before "
    "each pass."
)


def print_kernels(result: KernelResult, file: TextIO | None = None) -> None:
    """Write the tables, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    console = Console(file=out)
    formats = list(dict.fromkeys(time.format for time in result.linear))
    console.print(
        ceilings_table(result.ceilings, result.median_ceilings, machine_caption(result.machine, result.peak_rss_bytes))
    )
    if result.options.formats is not None and len(result.options.formats) > 1:
        for kernel in (LAYERS, LM_HEAD):
            console.print(formats_table(result, kernel, formats))
    else:
        console.print(linear_table(result))
    if result.instructions:
        console.print(instructions_table(result.instructions))
    if result.attention:
        console.print(attention_table(result))
    if result.sampling:
        console.print(sampling_table(result.sampling))
    out.write(json_line(result.to_dict()))


def ceilings_table(ceilings: Ceilings, usual: Ceilings, caption: str) -> Table:
    """What everything else is compared with."""
    table = _table(f"ceilings: {ceilings.isa}, {ceilings.num_threads} threads, many samples", caption)
    table.add_column("")
    table.add_column("best", justify="right")
    table.add_column("median", justify="right")
    table.add_column("unit")
    rows = [
        ("8-bit dot products", "dot_u8s8", "GOP/s"),
        ("8-bit by 4-bit dot products", "dot_u4s8", "GOP/s"),
        ("float32 multiply-adds", "fma", "GFLOP/s"),
        ("reading memory", "read", "GB/s"),
        (f"oneDNN int8, {GEMM_SIZE} cubed", "onednn_int8", "GOP/s"),
        (f"oneDNN float32, {GEMM_SIZE} cubed", "onednn_fp32", "GFLOP/s"),
    ]
    for label, name, unit in rows:
        best, middle = getattr(ceilings, name), getattr(usual, name)
        if best is not None:
            table.add_row(label, number(best / 1e9), "" if middle is None else number(middle / 1e9), unit)
    return table


def linear_table(result: KernelResult) -> Table:
    """Every linear layer, by rows."""
    table = _table(
        f"{result.model}: linear layers",
        f"All layers of the model, one after the other; together in one call up to 64 rows, as in a step. {RATES}",
    )
    table.add_column("rows", justify="right")
    table.add_column("kernel", no_wrap=True)
    table.add_column("format")
    _add_time_columns(table, MILLI)
    for time in result.linear:
        if time.kernel == LAYERS:
            table.add_section()
        table.add_row(str(time.case["rows"]), time.kernel, time.format, *_time_cells(time, MILLI))
    return table


def formats_table(result: KernelResult, kernel: str, formats: Sequence[str]) -> Table:
    """GOP/s of one kernel, formats beside each other."""
    table = _table(
        f"{result.model}: {kernel}, GOP/s (of the ceiling)",
        RATES,
    )
    table.add_column("rows", justify="right")
    for name in formats:
        table.add_column(name, justify="right")
    times = {(time.case["rows"], time.format): time for time in result.linear if time.kernel == kernel}
    for rows in result.options.rows:
        row = [times[rows, name] for name in formats]
        table.add_row(str(rows), *(f"{number(time.operations_per_s / 1e9)} ({_share(time)})" for time in row))
    return table


def instructions_table(counts: Sequence[InstructionCount]) -> Table:
    """Where the instructions of the linear kernels go."""
    table = _table("vector instructions for 32 weights and a row", "By rows of a block; outliers come on top.")
    table.add_column("format")
    for column in ("rows", "dot", "broadcast", "unpack", "epilogue", "total"):
        table.add_column(column, justify="right")
    for count in counts:
        parts = (count.dot, count.broadcast, count.unpack, count.epilogue, count.total)
        table.add_row(count.format, str(count.rows), *(f"{part:.3f}" for part in parts))
    return table


def attention_table(result: KernelResult) -> Table:
    """Decode and prefill, by batch and context."""
    table = _table(
        f"{result.model}: attention, one layer, K and V in {result.kv_cache_dtype}",
        "Sequences by tokens that each computes (1: decode), at a context; norm, rotation and KV writes included. "
        f"{RATES}",
    )
    table.add_column("batch", justify="right", no_wrap=True)
    table.add_column("context", justify="right")
    _add_time_columns(table, MICRO)
    for time in result.attention:
        case = time.case
        batch = f"{case['batch_size']} x {case['num_queries']}"
        table.add_row(batch, f"{case['context']:,}", *_time_cells(time, MICRO))
    return table


def sampling_table(times: Sequence[KernelTime]) -> Table:
    """Greedy and random choice, by rows."""
    settings = ", ".join(f"{name} {value:g}" for name, value in SamplingPass.RANDOM.items())
    table = _table("sampling", f"random: {settings}. The logits are in the cache, as after the LM head.")
    table.add_column("kernel")
    table.add_column("rows", justify="right")
    _add_time_columns(table, MICRO)
    for time in times:
        table.add_row(time.kernel, str(time.case["rows"]), *_time_cells(time, MICRO))
    return table


def _table(title: str, caption: str) -> Table:
    return Table(title=title, caption=caption, title_justify="left", caption_justify="left", min_width=80)


def _add_time_columns(table: Table, unit: tuple[str, float]) -> None:
    for column in (unit[0], "min", "max", "GOP/s", "GB/s", "ceiling"):
        table.add_column(column, justify="right")


def _time_cells(time: KernelTime, unit: tuple[str, float]) -> list[str]:
    spread = time.seconds
    return [
        *(number(unit[1] * seconds) for seconds in (spread.median, spread.min, spread.max)),
        number(time.operations_per_s / 1e9) if time.work.operations else "",
        number(time.bytes_per_s / 1e9),
        _share(time),
    ]


def _share(time: KernelTime) -> str:
    if time.share is None or time.limit is None:
        return ""
    return f"{100 * time.share:.0f}% {time.limit[0]}"
