"""The report of `chairlift plan`: tables, notes, and one JSON line."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.kernels.kernel_memory import total
from chairlift.lab.metrics.run import Summary
from chairlift.lab.planning.planner import DeploymentPlan, PolicyFit
from chairlift.lab.planning.predicted_speed import PredictedSpeed
from chairlift.lab.tables import constants_table, make_table, number, print_report


def print_plan(plan: DeploymentPlan, *, as_json: bool = False) -> None:
    """Print the report, as tables or as one JSON line."""
    parts: list[RenderableType] = [_memory_table(plan), _fit_table(plan)]
    if plan.speed is not None:
        parts += [constants_table(plan.speed.constants), _speed_table(plan.speed)]
        if plan.speed.kernels:
            parts.append(_kernel_table(plan.speed))
    fits = [policy.fit for policy in plan.policies]
    errors = [f"{fit.pool.name}: {fit.error}" for fit in fits if fit.error is not None]
    parts += [f"- {note}" for note in [*errors, *plan.notes]]
    print_report([*parts, Text(plan.serve, style="bold")], plan.to_dict(), as_json)


def _memory_table(plan: DeploymentPlan) -> Table:
    memory, pool = plan.memory, plan.memory.pool
    caption = f"KV pool: {pool.num_blocks:,} blocks of {pool.block_size} = {pool.num_slots:,} slots"
    if memory.free_share != 1:
        caption += f", in {memory.free_share:.0%} of the memory that weights and activations leave"
    title = f"{plan.model.name} on {memory.choice.kernels} kernels in {memory.choice.dtype}"
    sizes = [
        ("processes", plan.process_bytes or None),
        ("weights", total(memory.weights)),
        ("activations of a step, maximum", total(memory.activations)),
        ("KV pool", pool.kv_bytes),
        *_state_rows(pool),
        *([(f"swap space of {pool.num_swap_blocks:,} blocks", pool.swap_bytes)] if pool.num_swap_blocks else []),
        ("K and V of one token", memory.token_bytes),
        ("available memory", memory.memory_bytes and memory.memory_bytes + plan.process_bytes),
    ]
    rows = [(label, f"{size:,}", number(size / (1 << 20))) for label, size in sizes if size is not None]
    return make_table(title, ["memory", "bytes", "MiB"], caption, rows=rows)


def _state_rows(pool: KVCachePlan) -> list[tuple[str, int]]:
    """The rows of the recurrent states, if the model has them."""
    if not pool.state_bytes:
        return []
    num_drafts = pool.num_draft_states
    return [
        (f"recurrent states of {pool.num_states:,} requests", pool.num_states * pool.state_bytes),
        *([(f"states after {num_drafts:,} draft tokens", num_drafts * pool.state_bytes)] if num_drafts else []),
        (f"{pool.num_checkpoints:,} checkpoints of prefixes", pool.num_checkpoints * pool.state_bytes),
        ("recurrent state of one request", pool.state_bytes),
    ]


def _fit_table(plan: DeploymentPlan) -> Table:
    load = plan.load.to_dict()
    declared = "" if load["max_tokens"] is None else f", max_tokens {load['max_tokens']}"
    has_rejected = any(policy.fit.num_rejected for policy in plan.policies)
    table = make_table(
        f"Concurrent requests: prompt {load['input_len']}, output {load['output_len']}{declared}",
        [
            "kv",
            "fit",
            "fit, min",
            "fit, max",
            "run",
            "limited by",
            "written, %",
            *(["rejected"] if has_rejected else []),
        ],
        "fit: requests at their full length; min and max over other draws of lengths\n"
        "run: the requests that fit and have a seat; written: share of all slots\n"
        f"distinct prompts, max_model_len {plan.memory.max_model_len:,}, {plan.config.batching} batching, "
        f"seed {load['seed']}",
    )
    for policy in plan.policies:
        pool = policy.fit.pool
        is_chosen = (pool.kv, pool.kv_arena) == (plan.config.kv, plan.config.kv_arena)
        cells = [*_fit_cells(policy), *([f"{policy.fit.num_rejected:,}"] * has_rejected)]
        table.add_row(pool.name, *cells, style="bold" if is_chosen else "")
    return table


def _fit_cells(policy: PolicyFit) -> tuple[str, ...]:
    fit, draws = policy.fit, policy.draws
    if fit.error is not None:
        return ("0", "0", "0", "0", "see below", "")
    counts = (fit.num_fit, min(draws), max(draws), fit.num_running)
    num_slots = fit.pool.num_blocks * fit.pool.block_size
    return (*(f"{count:,}" for count in counts), fit.limited_by, f"{100 * fit.num_slots_written / num_slots:.1f}")


def _speed_table(speed: PredictedSpeed) -> Table:
    run = speed.run
    table = make_table("Predicted speed", ["", "p50", "p99"], f"under load: {speed.load}, simulated")
    if speed.ttft_alone is not None:
        table.add_row("TTFT of one request alone, ms", number(speed.ttft_alone * 1e3))
    table.add_row(f"ITL of {speed.batch_size} requests, ms", number(speed.itl * 1e3))
    table.add_row("ITL of them at their last token, ms", number(speed.itl_longest * 1e3))
    table.add_row("output tokens/s without prompts", number(speed.decode_tokens_per_s))
    table.add_row("TTFT under load, ms", *_percentiles(run.ttft))
    table.add_row("ITL under load, ms", *_percentiles(run.itl))
    table.add_row("output tokens/s under load", number(run.output_tokens_per_s))
    table.add_row("mean batch size under load", number(run.mean_batch_size))
    table.add_row("preemptions under load", number(run.preemptions))
    return table


def _kernel_table(speed: PredictedSpeed) -> Table:
    """The kernels of a decode step, without the overheads of the constants above."""
    table = make_table(
        f"Predicted kernels of a decode step of {speed.batch_size} requests",
        ["kernel", "calls", "MB", "ms", "share, %"],
        "in the middle of their outputs, by the constants above; never measured",
    )
    for cost in speed.kernels:
        cells = (f"{cost.num_calls:,}", number(cost.num_bytes / 1e6)) if cost.num_calls else ("", "")
        table.add_row(cost.name, *cells, number(cost.seconds * 1e3), number(100 * cost.seconds / speed.itl))
    total = sum(cost.num_bytes for cost in speed.kernels)
    table.add_row("together", "", number(total / 1e6), number(speed.itl * 1e3), "100", style="bold")
    return table


def _percentiles(summary: Summary | None) -> tuple[str, ...]:
    return () if summary is None else (number(summary.p50 * 1e3), number(summary.p99 * 1e3))
