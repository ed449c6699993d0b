"""A comparison for people: what the policies did, and whether they did it equally fast."""

from __future__ import annotations

import sys
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table

from chairlift.lab.bench.compare import CompareResult
from chairlift.lab.bench.comparison_result import COMPARED, ComparedFigure, figure_spread, ratio_spread
from chairlift.lab.bench.decode_speed import MIN_STEPS, TOLERANCE, DecodeSpeed, SpeedCheck
from chairlift.lab.bench.tables import machine_caption
from chairlift.lab.bench.text import json_line, load_arrivals, load_lengths, number

FILE_WIDTH: Final = 200
"""Columns where no terminal says how many it has; a table takes only what it needs."""

MAX_SPEED_ROWS: Final = 8
"""Numbers of rows that the table of speeds shows; the JSON line has all."""


def print_compare(result: CompareResult, file: TextIO | None = None) -> None:
    """Write the tables, then the JSON line, to `file` (standard output if None)."""
    out = file or sys.stdout
    console = Console(file=out)
    if not console.is_terminal:
        console = Console(file=out, width=FILE_WIDTH)
    console.print(compare_table(result))
    speeds = result.speeds
    if speeds.speeds:
        console.print(speed_table(speeds, list(result.runs)))
    console.print(speed_line(speeds), tokens_line(result), sep="\n", markup=False, highlight=False)
    out.write(json_line(result.to_dict()))


def compare_table(result: CompareResult) -> Table:
    """A column a policy. A figure is the median over the rounds, with the range below; a multiple is the median of the
    ratios of the rounds."""
    table = Table(title=_title(result), caption=_caption(result), title_justify="left", caption_justify="left")
    table.add_column("")
    table.add_column("unit")
    for name in result.runs:
        table.add_column(name, justify="right")
    for figure in COMPARED:
        table.add_row(figure.label, figure.unit, *_medians(result, figure))
        if figure.has_ratio and len(result.order) > 1:
            table.add_row("  min to max", "", *_ranges(result, figure))
        if figure.has_ratio:
            table.add_row(f"  times {result.first}", "", *_multiples(result, figure), end_section=True)
    return table


def _medians(result: CompareResult, figure: ComparedFigure) -> list[str]:
    spreads = [figure_spread(figure, runs) for runs in result.runs.values()]
    return ["" if spread is None else number(spread.median * figure.scale) for spread in spreads]


def _ranges(result: CompareResult, figure: ComparedFigure) -> list[str]:
    spreads = [figure_spread(figure, runs) for runs in result.runs.values()]
    return [
        "" if spread is None else f"{number(spread.min * figure.scale)} to {number(spread.max * figure.scale)}"
        for spread in spreads
    ]


def _multiples(result: CompareResult, figure: ComparedFigure) -> list[str]:
    first = result.runs[result.first]
    spreads = [ratio_spread(figure, runs, first) for runs in result.runs.values()]
    return ["" if spread is None else f"{spread.median:.2f}" for spread in spreads]


def _title(result: CompareResult) -> str:
    run = result.runs[result.first][0].metrics
    rounds = len(result.order)
    return (
        f"{result.engines[result.first].model}: {run.num_requests} requests {load_arrivals(result.options)}, "
        f"{run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens; {rounds} "
        f"{'round' if rounds == 1 else 'rounds'}, every policy once in each"
    )


def _caption(result: CompareResult) -> str:
    engine = result.engines[result.first]
    low, high = result.max_tokens
    declared = f"{high}" if low == high else f"{low} to {high}"
    num_slots = engine.num_blocks * engine.block_size
    return (
        f"{machine_caption(result.machine, result.peak_rss_bytes)}, {result.dtype}\n"
        f"for all: KV pool {engine.num_blocks} blocks of {engine.block_size} = {num_slots:,} slots, "
        f"max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens {engine.max_num_batched_tokens}, "
        f"max_model_len {engine.max_model_len}\n"
        f"{_particulars(result)}\n"
        f"{load_lengths(result.options)}; declared as max_tokens: {declared}\n"
        f"KV slots: {_when_sampled(result)}, reserved and internal by the true lengths; "
        "batch: finished rows of static batches included"
    )


def _particulars(result: CompareResult) -> str:
    """What goes for some policies only."""
    parts = []
    for name, engine in result.engines.items():
        kv = engine.kv if engine.kv_arena is None else f"{engine.kv}, {engine.kv_arena}"
        static = ""
        if engine.static_batch_size is not None:
            static = f"({engine.static_batch_size}), run to {engine.static_run_to}"
        parts.append(f"{name}: {engine.batching}{static}, kv {kv}{_cache(engine.enable_prefix_caching)}")
    return "\n".join(parts)


def _cache(is_enabled: bool) -> str:
    return ", prefix cache on" if is_enabled else ""


def _when_sampled(result: CompareResult) -> str:
    never = [name for name, runs in result.runs.items() if not all(run.memory.is_saturated for run in runs)]
    text = "while requests waited"
    return f"{text} ({', '.join(never)}: over the whole run, nobody ever waited)" if never else text


def speed_table(speeds: SpeedCheck, policies: list[str]) -> Table:
    """A line a number of rows: those under which most policies, and then most steps, can be compared."""
    chosen = sorted(speeds.speeds, key=lambda num_rows: _weight(speeds.speeds[num_rows]), reverse=True)[:MAX_SPEED_ROWS]
    table = Table(
        title="Equal work: computed tokens/s of decode steps",
        caption="padding included; medians; a few requests\nof one length, run at once under every\npolicy, in turns",
        title_justify="left",
        caption_justify="left",
    )
    for column in ("rows", *policies):
        table.add_column(column, justify="right")
    for num_rows in sorted(chosen):
        by_policy = speeds.speeds[num_rows]
        cells = [number(by_policy[name].tokens_per_s) if name in by_policy else "" for name in policies]
        table.add_row(str(num_rows), *cells)
    return table


def _weight(by_policy: dict[str, DecodeSpeed]) -> tuple[int, int]:
    return len(by_policy), min(speed.num_steps for speed in by_policy.values())


def speed_line(speeds: SpeedCheck) -> str:
    """Whether the policies can be compared at all."""
    largest = speeds.largest
    if largest is None:
        return f"equally fast: unknown, requests are too short to compare {MIN_STEPS} decode steps"
    verdict = "yes" if largest.share <= TOLERANCE else "NO"
    return (
        f"equally fast: {verdict}, at most {largest.share:.1%} apart, at {largest.num_rows} rows "
        f"(tolerance {TOLERANCE:.0%})"
    )


def tokens_line(result: CompareResult) -> str:
    """Whether the policies answered alike."""
    tokens = result.tokens
    rounds = "" if len(result.order) == 1 else f" in {len(result.order)} rounds"
    text = f"same tokens: {'yes' if tokens.is_same else 'NO'}, {tokens.num_same} of {tokens.num_requests} requests"
    first = tokens.first_difference
    if first is None:
        return text + rounds
    return (
        f"{text}{rounds}; the first difference: round {first.round}, request {first.request_id}, {first.policy}, "
        f"output token {first.position} (in {result.dtype})"
    )
