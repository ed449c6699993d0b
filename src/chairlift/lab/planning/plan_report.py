"""The report of `chairlift plan`: the arithmetic line by line, tables, notes, and one JSON line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chairlift.core.kv.kv_cache_manager import FULL
from chairlift.engine.startup.memory_plan import (
    INT8_SCALE_BYTES,
    KV_DTYPE_BYTES,
    MemoryPlan,
    share_with_states,
    swap_bytes_in,
)
from chairlift.kernels.kernel_memory import SPARE_BLOCKS, MemoryItem, total
from chairlift.lab.metrics.summary import Summary
from chairlift.lab.planning.planner import DeploymentPlan, PolicyFit
from chairlift.lab.planning.predicted_speed import PredictedSpeed
from chairlift.lab.tables import make_table, number, print_report
from chairlift.worker.kv_cache_plan import KVCachePlan
from chairlift.worker.memory import format_memory


def print_plan(
    plan: DeploymentPlan, *, explained: bool = False, as_json: bool = False, file: TextIO | None = None
) -> None:
    """Write the report to `file` (standard output if None).

    Args:
        explained: write the arithmetic before the tables.
        as_json: write the JSON line instead of the tables.
    """
    parts: list[RenderableType] = [*(explain(plan) if explained else []), _memory_table(plan), _fit_table(plan)]
    if plan.speed is not None:
        parts.append(_speed_table(plan.speed))
    fits = [policy.fit for policy in plan.policies]
    errors = [f"{fit.pool.name}: {fit.error}" for fit in fits if fit.error is not None]
    parts += [f"- {note}" for note in [*errors, *plan.notes]]
    print_report([*parts, Text(plan.serve, style="bold")], plan.to_dict(), file, as_json)


def _memory_table(plan: DeploymentPlan) -> Table:
    memory, pool = plan.memory, plan.memory.pool
    caption = f"KV pool: {pool.num_blocks:,} blocks of {pool.block_size} = {pool.num_slots:,} slots"
    if memory.free_share != 1:
        caption += f", in {memory.free_share:.0%} of the memory that weights and activations leave"
    title = f"{plan.model.name} on {memory.choice.kernels} kernels in {memory.choice.dtype}"
    table = make_table(title, ["memory", "bytes", "MiB"], caption)
    rows = [
        ("weights", total(memory.weights)),
        ("activations of a step, maximum", total(memory.activations)),
        ("KV pool", pool.kv_bytes),
        *_state_rows(pool),
        *([(f"swap space of {pool.num_swap_blocks:,} blocks", pool.swap_bytes)] if pool.num_swap_blocks else []),
        ("K and V of one token", memory.token_bytes),
        ("available memory", memory.memory_bytes),
    ]
    for label, num_bytes in rows:
        if num_bytes is not None:
            table.add_row(label, f"{num_bytes:,}", number(num_bytes / (1 << 20)))
    return table


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


def _percentiles(summary: Summary | None) -> tuple[str, ...]:
    return () if summary is None else (number(summary.p50 * 1e3), number(summary.p99 * 1e3))


def explain(plan: DeploymentPlan) -> list[str]:
    """The arithmetic from the sizes of the model to blocks, requests and seconds, one step to a line."""
    memory, limits = plan.memory, plan.memory.limits
    return [
        f"Weights of {plan.model.name} for {memory.choice.kernels} kernels",
        *_sum(memory.weights),
        f"Activations of the largest step: {limits.max_num_batched_tokens:,} tokens of {limits.max_num_seqs:,} "
        f"requests with contexts of up to {limits.max_model_len:,} tokens",
        *_sum(memory.activations),
        "K and V",
        *_kv(plan),
        *_blocks(plan),
        f"Concurrent requests under kv={plan.fit.pool.name}",
        *_requests(plan),
        *_seconds(plan),
    ]


def _sum(items: Sequence[MemoryItem]) -> list[str]:
    lines = [f"  {item.name}: {item.formula} = {item.num_bytes:,}" for item in items]
    return [*lines, f"  sum = {total(items):,} bytes = {format_memory(total(items))}"]


def _kv(plan: DeploymentPlan) -> list[str]:
    model, memory, pool = plan.model.config, plan.memory, plan.memory.pool
    dtype = memory.choice.kv_cache_dtype
    scales = f" + {INT8_SCALE_BYTES} of scales" if dtype == "int8" else ""
    slot = " + ".join(
        f"{count} layers x {num_heads} KV heads x (2 x {head_dim} x {KV_DTYPE_BYTES[dtype]}{scales})"
        for (num_heads, head_dim), count in Counter(
            (spec.num_kv_heads, spec.head_dim) for spec in memory.layout.positions(model) if spec.kv_source is None
        ).items()
    )
    lines = [
        *_groups(memory),
        f"  a slot: {slot} bytes = {memory.slot_bytes:,}",
        f"  a block: {pool.block_size} slots x {memory.slot_bytes:,} = {pool.block_bytes:,}",
    ]
    if memory.memory_bytes is not None and memory.kv_bytes is not None:
        share = "" if memory.free_share == 1 else f" x {memory.free_share:g}"
        swap = f" - {size:,} of swap space" if (size := swap_bytes_in(plan.config, plan.config.device)) else ""
        lines.append(
            f"  for K and V: ({memory.memory_bytes:,} - {total(memory.weights):,} - {total(memory.activations):,})"
            f"{share}{swap} = {memory.kv_bytes:,}"
        )
    return lines


def _groups(memory: MemoryPlan) -> list[str]:
    """The groups of layers, if some of them release blocks that left a window."""
    layout = memory.layout
    if layout.windows == FULL:
        return []
    groups = Counter(zip(map(len, layout.layers), layout.windows, strict=True))
    sizes = ", ".join(
        f"{count} x {size} layers with {'all tokens' if window is None else f'a window of {window:,}'}"
        for (size, window), count in groups.items()
    )
    budget, size = memory.limits.max_num_batched_tokens, memory.pool.block_size
    return [
        f"  groups of layers with slots of their own: {sizes}",
        f"  blocks of a request in a group with a window W: at most ceil((W - 1 + {budget:,}) / {size}) + 1",
    ]


def _blocks(plan: DeploymentPlan) -> list[str]:
    config, memory, pool = plan.config, plan.memory, plan.memory.pool
    lines: list[str] = []
    if memory.kv_bytes is not None:
        num_bytes = memory.kv_bytes
        if pool.state_bytes:
            num_bytes, kept = share_with_states(memory.kv_bytes - pool.running_state_bytes, config, pool.state_bytes)
            drafts = f" and {pool.num_draft_states:,} draft tokens" if pool.num_draft_states else ""
            lines.append(
                f"  for K and V without states: {memory.kv_bytes:,} - {pool.num_states:,} requests{drafts} x "
                f"{pool.state_bytes:,} - {kept:,} for checkpoints = {num_bytes:,}"
            )
        affordable = num_bytes // pool.block_bytes - SPARE_BLOCKS
        lines.append(f"  blocks: floor({num_bytes:,} / {pool.block_bytes:,}) - {SPARE_BLOCKS} spare = {affordable:,}")
    if pool.limited_by == "demand":
        longest = config.max_model_len or plan.model.config.max_position_embeddings
        blocks = f"ceil({longest:,} / {pool.block_size})"
        if pool.windows != FULL:
            blocks = f"{pool.num_blocks // config.max_num_seqs:,} blocks of {longest:,} tokens"
        lines.append(
            f"  more than requests can use: {config.max_num_seqs} requests x {blocks} = {pool.num_blocks:,} blocks"
        )
    lines.append(
        f"  pool: {pool.num_blocks:,} x {pool.block_size} = {pool.num_slots:,} slots, with the spare block "
        f"{pool.kv_bytes:,} bytes = {format_memory(pool.kv_bytes)}"
    )
    return lines


def _requests(plan: DeploymentPlan) -> list[str]:
    fit, num_slots = plan.fit, plan.memory.pool.num_slots
    if fit.error is not None:
        return [f"  none: {fit.error}"]
    lines = [
        "  P prompt and n output tokens write P + n - 1 slots: K and V of the last token are never written",
        f"  {fit.num_fit:,} requests write {fit.num_slots_written:,} slots and hold {fit.num_slots_held:,} of "
        f"{num_slots:,}; the next one does not fit",
        f"  run at the same time: {fit.num_running:,}, limited by {fit.limited_by}",
    ]
    if fit.num_rejected:
        lines.append(f"  rejected, because they can never fit: {fit.num_rejected:,} of the requests before them")
    return lines


def _seconds(plan: DeploymentPlan) -> list[str]:
    speed = plan.speed
    if speed is None:
        return []
    ttft = "none" if speed.ttft_alone is None else f"{speed.ttft_alone * 1e3:.4g} ms"
    return [
        "Seconds, by the cost model",
        *(f"  {name}: {value}" for name, value in speed.constants),
        f"  ITL of {speed.batch_size} requests in the middle of their outputs, which read {speed.num_context:,} tokens "
        f"of K and V: {speed.itl * 1e3:.4g} ms; {speed.batch_size} / {speed.itl * 1e3:.4g} ms = "
        f"{speed.decode_tokens_per_s:,.4g} output tokens/s",
        f"  ITL of all requests at their last token: {speed.itl_longest * 1e3:.4g} ms",
        f"  TTFT of one request of mean lengths alone, simulated: {ttft}",
        f"  under load: {speed.load}, simulated with the scheduler of the engine",
    ]
