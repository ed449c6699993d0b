"""The tables of `chairlift bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TextIO

from rich.table import Table

from chairlift.lab.bench.kernels.benchmark import KernelResult, KernelTime
from chairlift.lab.bench.kernels.ceilings import READ, UNITS
from chairlift.lab.bench.kernels.passes import LAYERS, SamplingPass
from chairlift.lab.bench.machine import machine_caption
from chairlift.lab.tables import make_table, number, print_report
from chairlift.models.declaration import LM_HEAD

MILLI: Final = ("ms", 1e3)
MICRO: Final = ("µs", 1e6)
MIN_WIDTH: Final = 80

CEILING_NOTE: Final = (
    "The ceiling is the speed of the vector units or of reading memory, whichever takes longer, measured immediately "
    "before each pass."
)


def print_kernels(result: KernelResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write the tables, or the JSON line, to `file` (standard output if None)."""
    tables = [ceilings_table(result)]
    if result.options.formats is not None and len(result.options.formats) > 1:
        tables += [formats_table(result, kernel) for kernel in (LAYERS, LM_HEAD)]
    else:
        tables.append(linear_table(result))
    if result.attention:
        tables.append(attention_table(result))
    if result.recurrence:
        tables.append(recurrence_table(result))
    if result.sampling:
        tables.append(sampling_table(result.sampling))
    print_report(tables, result.to_dict(), file, as_json)


def ceilings_table(result: KernelResult) -> Table:
    """Create a table of the speeds that all kernels are compared with."""
    best, usual = result.ceilings, result.median_ceilings
    table = make_table(
        f"ceilings: {best.isa}, {best.num_threads} threads, many samples",
        ["", "best", "median"],
        machine_caption(result.machine, result.peak_rss_bytes),
        min_width=MIN_WIDTH,
    )
    for name, label in (*UNITS.items(), (READ, "reading memory, GB/s")):
        if name in best.speeds:
            table.add_row(label, *(number(each.speeds[name] / 1e9) for each in (best, usual)))
    return table


def linear_table(result: KernelResult) -> Table:
    """Create a table of the linear layers by rows of activations."""
    table = _time_table(
        f"{result.model}: linear layers",
        ["rows", "kernel", "format"],
        MILLI,
        "All layers of the model, one after the other. `layers`: as in a step, in one call with up to 64 rows. "
        + CEILING_NOTE,
    )
    for time in result.linear:
        if time.kernel == LAYERS:
            table.add_section()
        table.add_row(str(time.case["rows"]), time.kernel, time.format, *_time_cells(time, MILLI))
    return table


def formats_table(result: KernelResult, kernel: str) -> Table:
    """Create a table of the speed of one kernel with every weight format."""
    formats = list(dict.fromkeys(time.format for time in result.linear))
    columns = [f"{name} {unit}" for name in formats for unit in ("GOP/s", "% of ceiling")]
    table = make_table(f"{result.model}: {kernel}", ["rows", *columns], CEILING_NOTE, min_width=MIN_WIDTH)
    times = {(time.case["rows"], time.format): time for time in result.linear if time.kernel == kernel}
    for rows in result.options.rows:
        row = [times[rows, name] for name in formats]
        cells = (cell for time in row for cell in (number(time.operations_per_s / 1e9), _percent(time)))
        table.add_row(str(rows), *cells)
    return table


def attention_table(result: KernelResult) -> Table:
    """Create a table of decode and prefill attention by batch and context."""
    table = _time_table(
        f"{result.model}: attention, one layer, K and V in {result.kv_cache_dtype}",
        ["sequences", "new tokens", "context"],
        MICRO,
        "new tokens: computed for each sequence (1: decode). Norm, rotation and KV writes are included. "
        + CEILING_NOTE,
    )
    for time in result.attention:
        sizes = (time.case[name] for name in ("batch_size", "num_queries", "context"))
        table.add_row(*(f"{size:,}" for size in sizes), *_time_cells(time, MICRO))
    return table


def recurrence_table(result: KernelResult) -> Table:
    """Create a table of decode and prefill of layers with recurrent state by batch."""
    table = _time_table(
        f"{result.model}: recurrence, one layer",
        ["sequences", "new tokens"],
        MICRO,
        "Convolution, gates, states and norm: everything between the projections. " + CEILING_NOTE,
    )
    for time in result.recurrence:
        sizes = (time.case[name] for name in ("batch_size", "num_queries"))
        table.add_row(*(f"{size:,}" for size in sizes), *_time_cells(time, MICRO))
    return table


def sampling_table(times: Sequence[KernelTime]) -> Table:
    """Create a table of greedy and random sampling by rows."""
    settings = ", ".join(f"{name} {value:g}" for name, value in SamplingPass.RANDOM.items())
    caption = f"random: {settings}. The logits are in the cache, as after the LM head."
    table = _time_table("sampling", ["kernel", "rows"], MICRO, caption)
    for time in times:
        table.add_row(time.kernel, str(time.case["rows"]), *_time_cells(time, MICRO))
    return table


def _time_table(title: str, columns: Sequence[str], unit: tuple[str, float], caption: str) -> Table:
    times = [f"{name}, {unit[0]}" for name in ("median", "min", "max")]
    return make_table(
        title, [*columns, *times, "GOP/s", "GB/s", "% of ceiling", "limited by"], caption, min_width=MIN_WIDTH
    )


def _time_cells(time: KernelTime, unit: tuple[str, float]) -> list[str]:
    spread = time.seconds
    return [
        *(number(unit[1] * seconds) for seconds in (spread.median, spread.min, spread.max)),
        number(time.operations_per_s / 1e9) if time.work.operations else "",
        number(time.bytes_per_s / 1e9),
        _percent(time),
        time.limited_by or "",
    ]


def _percent(time: KernelTime) -> str:
    return "" if time.ceiling_share is None else f"{100 * time.ceiling_share:.0f}"
