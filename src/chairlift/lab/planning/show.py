"""A plan for people, and as the last line one JSON object for programs."""

from __future__ import annotations

import json
import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chairlift.engine.startup.memory_plan import total
from chairlift.lab.metrics.percentile import Summary
from chairlift.lab.planning.explain import explain
from chairlift.lab.planning.planner import Plan, PolicyFit
from chairlift.lab.planning.speed import Speed
from chairlift.worker.memory import format_memory


def print_plan(plan: Plan, *, explained: bool = False, only_json: bool = False, file: TextIO | None = None) -> None:
    """Write the arithmetic if asked for, the tables, notes and the command, and then the JSON line, to `file` (standard
    output if None)."""
    out = file or sys.stdout
    if not only_json:
        _print(plan, explained, Console(file=out))
    out.write(json.dumps(plan.to_dict(), allow_nan=False) + "\n")


def _print(plan: Plan, explained: bool, console: Console) -> None:
    if explained:
        for line in explain(plan):
            console.print(Text(line), soft_wrap=True)
    console.print(_memory_table(plan))
    console.print(_fit_table(plan))
    if plan.speed is not None:
        console.print(_speed_table(plan.speed))
    for note in [*_refusals(plan), *plan.notes]:
        console.print(Text(f"- {note}"), soft_wrap=True)
    console.print(Text(plan.serve, style="bold"), soft_wrap=True)


def _table(title: str, *columns: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    return table


def _memory_table(plan: Plan) -> Table:
    memory, pool = plan.memory, plan.memory.pool
    table = _table(
        f"{plan.model.name} on {memory.choice.kernels} kernels in {memory.choice.dtype}", "memory", "bytes", ""
    )
    rows = [
        ("weights", total(memory.weights)),
        ("activations of a step, at most", total(memory.activations)),
        (f"KV pool, {pool.num_blocks:,} blocks of {pool.block_size} = {pool.num_slots:,} slots", pool.num_bytes),
        ("K and V of a token", memory.slot_bytes),
    ]
    for what, num_bytes in rows:
        table.add_row(what, f"{num_bytes:,}", format_memory(num_bytes))
    if memory.memory_bytes is not None:
        share = "" if memory.free_share == 1 else f"; K and V get {memory.free_share:.0%} of what is left"
        table.add_row(f"memory{share}", f"{memory.memory_bytes:,}", format_memory(memory.memory_bytes))
    return table


def _fit_table(plan: Plan) -> Table:
    load = plan.load.to_dict()
    asked = "" if load["max_tokens"] is None else f", max_tokens {load['max_tokens']}"
    has_refused = any(each.fit.num_rejected for each in plan.policies)
    table = _table(
        f"Requests at once: prompt {load['prompt_len']}, output {load['output_len']}{asked}",
        *("kv", "fit (other draws)", "run", "limited by", "written"),
        *(["refused"] if has_refused else []),
        caption=f"fit: all at their full length; run: within the seats; written: of all slots\n"
        f"distinct prompts, max_model_len {plan.memory.max_model_len:,}, {plan.config.batching} batching, "
        f"seed {load['seed']}",
    )
    for each in plan.policies:
        pool = each.fit.pool
        cells = _fit_cells(each, plan.memory.pool.num_slots)
        is_chosen = (pool.kv, pool.kv_arena) == (plan.config.kv, plan.config.kv_arena)
        table.add_row(*cells, *([f"{each.fit.num_rejected:,}"] * has_refused), style="bold" if is_chosen else "")
    return table


def _fit_cells(policy: PolicyFit, num_slots: int) -> tuple[str, ...]:
    fit, draws = policy.fit, policy.draws
    if fit.error is not None:
        return (fit.pool.name, "0", "0", "see below", "")
    spread = f" ({min(draws):,}..{max(draws):,})" if min(draws) < max(draws) else ""
    written = f"{fit.num_slots_written / num_slots:.1%}"
    return (fit.pool.name, f"{fit.num_fit:,}{spread}", f"{fit.num_running:,}", fit.limited_by, written)


def _refusals(plan: Plan) -> list[str]:
    """Why nothing fits, where nothing does."""
    fits = [each.fit for each in plan.policies]
    return [f"{fit.pool.name}: {fit.error}" for fit in fits if fit.error is not None]


def _speed_table(speed: Speed) -> Table:
    run = speed.run
    table = _table("Expected", "", "p50", "p99", "unit", caption=f"under load: {speed.load}, simulated")
    if speed.ttft_alone is not None:
        table.add_row("TTFT alone", _ms(speed.ttft_alone), "", "ms")
    table.add_row(f"ITL of {speed.batch_size} requests", _ms(speed.itl), "", "ms")
    table.add_row("ITL, all at their last token", _ms(speed.itl_longest), "", "ms")
    table.add_row("output tokens, decodes alone", _number(speed.decode_tokens_per_s), "", "/s")
    for label, summary in (("TTFT under load", run.ttft), ("ITL under load", run.itl)):
        table.add_row(label, *_percentiles(summary), "ms")
    table.add_row("output tokens under load", _number(run.output_tokens_per_s), "", "/s")
    table.add_row("batch under load, mean", f"{run.mean_batch_size:.4g}", "", "requests")
    table.add_row("preemptions under load", f"{run.preemptions:,}", "", "")
    return table


def _percentiles(summary: Summary | None) -> tuple[str, str]:
    return ("", "") if summary is None else (_ms(summary.p50), _ms(summary.p99))


def _ms(seconds: float) -> str:
    return _number(seconds * 1e3)


def _number(value: float) -> str:
    """Four significant digits, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
