"""The tables of `chairlift bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Final, TextIO

from rich.table import Table

from chairlift.lab.bench.kernels.benchmark import KernelResult, KernelTime
from chairlift.lab.bench.kernels.ceilings import READ, UNITS
from chairlift.lab.bench.kernels.passes import LAYERS, SamplingPass
from chairlift.lab.bench.machine import machine_caption
from chairlift.lab.tables import make_table, number, print_report
from chairlift.models.declaration import LM_HEAD

Column = Callable[[KernelTime], str]

MILLI: Final = ("ms", 1e3)
MICRO: Final = ("µs", 1e6)
MIN_WIDTH: Final = 80

CEILING_NOTE: Final = (
    "The ceiling is the speed of the vector units or of reading memory, whichever takes longer, measured immediately "
    "before each pass."
)


def _size(name: str) -> Column:
    return lambda time: f"{time.case[name]:,}"


ROWS: Final[dict[str, Column]] = {"rows": _size("rows"), "kernel": attrgetter("kernel")}
SEQUENCES: Final[dict[str, Column]] = {"sequences": _size("batch_size"), "new tokens": _size("num_queries")}
"""The columns of the sizes of passes: heading -> the cell of a time."""


def print_kernels(result: KernelResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write the tables, or the JSON line, to `file` (standard output if None)."""
    tables = [_ceilings_table(result)]
    if result.options.formats is not None and len(result.options.formats) > 1:
        tables += [_formats_table(result, kernel) for kernel in (LAYERS, LM_HEAD)]
    else:
        note = "All layers of the model, one after the other. `layers`: as in a step, in one call with up to 64 rows. "
        columns: dict[str, Column] = {**ROWS, "format": attrgetter("format")}
        tables.append(_time_table(f"{result.model}: linear layers", result.linear, columns, MILLI, note + CEILING_NOTE))
    if result.attention:
        title = f"{result.model}: attention, one layer, K and V in {result.kv_cache_dtype}"
        note = "new tokens: computed for each sequence (1: decode). Norm, rotation and KV writes are included. "
        contexts = {**SEQUENCES, "context": _size("context")}
        tables.append(_time_table(title, result.attention, contexts, MICRO, note + CEILING_NOTE))
    if result.recurrence:
        note = "Convolution, gates, states and norm: everything between the projections. "
        title = f"{result.model}: recurrence, one layer"
        tables.append(_time_table(title, result.recurrence, SEQUENCES, MICRO, note + CEILING_NOTE))
    if result.sampling:
        settings = ", ".join(f"{name} {value:g}" for name, value in SamplingPass.RANDOM.items())
        note = f"random: {settings}. The logits are in the cache, as after the LM head."
        tables.append(_time_table("sampling", result.sampling, ROWS, MICRO, note))
    print_report(tables, result.to_dict(), file, as_json)


def _ceilings_table(result: KernelResult) -> Table:
    """The table of the speeds that all kernels are compared with."""
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


def _formats_table(result: KernelResult, kernel: str) -> Table:
    """The table of the speed of one kernel with every weight format."""
    formats = list(dict.fromkeys(time.format for time in result.linear))
    columns = [f"{name} {unit}" for name in formats for unit in ("GOP/s", "% of ceiling")]
    table = make_table(f"{result.model}: {kernel}", ["rows", *columns], CEILING_NOTE, min_width=MIN_WIDTH)
    times = {(time.case["rows"], time.format): time for time in result.linear if time.kernel == kernel}
    for rows in result.options.rows:
        row = [times[rows, name] for name in formats]
        cells = (cell for time in row for cell in (number(time.operations_per_s / 1e9), _percent(time)))
        table.add_row(str(rows), *cells)
    return table


def _time_table(
    title: str, times: Sequence[KernelTime], columns: dict[str, Column], unit: tuple[str, float], caption: str
) -> Table:
    """The table of the times of kernels, with these columns before the times."""
    headings = [*columns, *(f"{name}, {unit[0]}" for name in ("median", "min", "max"))]
    headings += ["GOP/s", "GB/s", "% of ceiling", "limited by"]
    table = make_table(title, headings, caption, min_width=MIN_WIDTH)
    for time in times:
        if time.kernel == LAYERS:
            table.add_section()
        table.add_row(*(cell(time) for cell in columns.values()), *_time_cells(time, unit[1]))
    return table


def _time_cells(time: KernelTime, scale: float) -> list[str]:
    spread = time.seconds
    return [
        *(number(scale * seconds) for seconds in (spread.median, spread.min, spread.max)),
        number(time.operations_per_s / 1e9) if time.work.operations else "",
        number(time.bytes_per_s / 1e9),
        _percent(time),
        time.limited_by or "",
    ]


def _percent(time: KernelTime) -> str:
    return "" if time.ceiling_share is None else f"{100 * time.ceiling_share:.0f}"
