"""The tables of `chairlift bench compare`: the figures of each policy, and the checks of speed and tokens."""

from __future__ import annotations

from typing import Final, TextIO

from rich.table import Table

from chairlift.lab.bench.compare import CompareResult
from chairlift.lab.bench.comparison_result import (
    COMPARED,
    MIN_STEPS,
    TOLERANCE,
    WITH_RATIO,
    SpeedCheck,
    metric_range,
    ratio_range,
)
from chairlift.lab.bench.machine import machine_caption
from chairlift.lab.bench.workload_options import format_arrivals, format_lengths
from chairlift.lab.tables import make_table, number, print_report, row_label

MAX_SPEED_ROWS: Final = 8
"""Maximum number of lines in the table of speeds. The JSON line has all."""


def print_compare(result: CompareResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write the tables and the checks, or the JSON line, to `file` (standard output if None)."""
    speed_tables = [speed_table(result.speeds, list(result.runs))] if result.speeds.speeds else []
    lines = [speed_line(result.speeds), tokens_line(result)]
    print_report([compare_table(result), *speed_tables, *lines], result.to_dict(), file, as_json)


def compare_table(result: CompareResult) -> Table:
    """Create a table with a column for each policy.

    A figure is the median over the rounds, followed by its minimum and maximum; a ratio is the median of the ratios of
    the rounds.
    """
    table = make_table(_title(result), ["", *result.runs], _caption(result))
    baseline = result.runs[result.baseline]
    for metric in COMPARED:
        ranges = [metric_range(metric, runs) for runs in result.runs.values()]
        rows = {"median": row_label(metric.label, metric.unit)}
        if metric.key in WITH_RATIO and len(result.order) > 1:
            rows |= {"min": "  minimum", "max": "  maximum"}
        for statistic, label in rows.items():
            values = ("" if found is None else number(getattr(found, statistic) * metric.scale) for found in ranges)
            table.add_row(label, *values)
        if metric.key in WITH_RATIO:
            ratios = [ratio_range(metric, runs, baseline) for runs in result.runs.values()]
            cells = ("" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios)
            table.add_row(f"  ratio to {result.baseline}", *cells, end_section=True)
    return table


def _title(result: CompareResult) -> str:
    run = result.runs[result.baseline][0].metrics
    rounds = len(result.order)
    return (
        f"{result.engines[result.baseline].model}: {run.num_requests} requests {format_arrivals(result.options)}, "
        f"{run.prompt_tokens:,} prompt and {run.output_tokens:,} output tokens; {rounds} "
        f"{'round' if rounds == 1 else 'rounds'} with one run of each policy"
    )


def _caption(result: CompareResult) -> str:
    engine = result.engines[result.baseline]
    low, high = result.max_tokens
    declared = f"{high}" if low == high else f"{low} to {high}"
    return (
        f"{machine_caption(result.machine, result.peak_rss_bytes)}, {result.dtype}\n"
        f"all policies: KV pool {engine.num_blocks} blocks of {engine.block_size} = "
        f"{engine.num_blocks * engine.block_size:,} slots, max_num_seqs {engine.max_num_seqs}, "
        f"max_num_batched_tokens {engine.max_num_batched_tokens}, max_model_len {engine.max_model_len}\n"
        f"{_policies(result)}\n"
        f"{format_lengths(result.options)}; max_tokens of the requests: {declared}\n"
        f"KV slots: {_sampled_steps(result)}; reserved slots and internal fragmentation by the true lengths\n"
        "mean batch size: finished rows of static batches are included"
    )


def _policies(result: CompareResult) -> str:
    """One line for each policy with the settings that are not the same for all."""
    lines = []
    for name, engine in result.engines.items():
        kv = engine.kv if engine.kv_arena is None else f"{engine.kv}, {engine.kv_arena}"
        static = ""
        if engine.static_batch_size is not None:
            static = f"({engine.static_batch_size}), run to {engine.static_run_to}"
        cache = ", prefix cache on" if engine.enable_prefix_caching else ""
        lines.append(f"{name}: {engine.batching}{static}, kv {kv}{cache}")
    return "\n".join(lines)


def _sampled_steps(result: CompareResult) -> str:
    never = [name for name, runs in result.runs.items() if not all(run.memory.is_saturated for run in runs)]
    text = "mean over the steps in which requests waited"
    return f"{text} ({', '.join(never)}: over all steps, because no request waited)" if never else text


def speed_table(speeds: SpeedCheck, policies: list[str]) -> Table:
    """Create a table with a line for each number of rows, preferring those with most policies and steps."""

    def weight(num_rows: int) -> tuple[int, int]:
        by_policy = speeds.speeds[num_rows]
        return len(by_policy), min(speed.num_steps for speed in by_policy.values())

    chosen = sorted(sorted(speeds.speeds, key=weight, reverse=True)[:MAX_SPEED_ROWS])
    table = make_table(
        "Decode steps with equal work: computed tokens/s, median",
        ["rows", *policies],
        "padding included; each policy runs the same\nrequests of one length at the same time",
    )
    for num_rows in chosen:
        by_policy = speeds.speeds[num_rows]
        cells = [number(by_policy[name].tokens_per_s) if name in by_policy else "" for name in policies]
        table.add_row(str(num_rows), *cells)
    return table


def speed_line(speeds: SpeedCheck) -> str:
    """State whether the policies compute equally fast, so that they can be compared."""
    largest = speeds.largest
    if largest is None:
        return f"equally fast: unknown, because the requests are too short to compare {MIN_STEPS} decode steps"
    verdict = "yes" if largest.share <= TOLERANCE else "NO"
    return (
        f"equally fast: {verdict}, largest difference {largest.share:.1%}, with {largest.num_rows} rows "
        f"(tolerance {TOLERANCE:.0%})"
    )


def tokens_line(result: CompareResult) -> str:
    """State whether the policies generated the same tokens."""
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
