"""A plan's arithmetic, line by line, with the numbers in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from chairlift.engine.startup.memory_plan import INT8_SCALE_BYTES, KV_DTYPE_BYTES, MemoryItem, total
from chairlift.lab.planning.planner import Plan
from chairlift.worker.kv_cache_plan import SPARE_BLOCKS
from chairlift.worker.memory import format_memory


def explain(plan: Plan) -> list[str]:
    """Every step from the model's sizes to blocks, requests and seconds."""
    memory, limits = plan.memory, plan.memory.limits
    return [
        f"Weights of {plan.model.name} for {memory.choice.kernels} kernels",
        *_sum(memory.weights),
        f"Activations of the largest step, at most: {limits.num_tokens:,} tokens of {limits.num_seqs:,} requests that "
        f"see up to {limits.max_model_len:,} tokens",
        *_sum(memory.activations),
        "K and V",
        *_kv(plan),
        f"Requests at once under kv={plan.fit.pool.name}",
        *_requests(plan),
        *_seconds(plan),
    ]


def _sum(items: Sequence[MemoryItem]) -> list[str]:
    lines = [f"  {item.name}: {item.formula} = {item.num_bytes:,}" for item in items]
    return [*lines, f"  sum = {total(items):,} bytes = {format_memory(total(items))}"]


def _kv(plan: Plan) -> list[str]:
    model, memory, pool = plan.model.config, plan.memory, plan.memory.pool
    kept = memory.choice.kv_cache_dtype
    scales = f" + {INT8_SCALE_BYTES} of scales" if kept == "int8" else ""
    slot = " + ".join(
        f"{count} layers x {state.num_kv_heads} KV heads x (2 x {state.head_dim} x {KV_DTYPE_BYTES[kept]}{scales})"
        for state, count in Counter(layer.state for layer in model.layers).items()
    )
    lines = [
        f"  a slot: {slot} bytes = {memory.slot_bytes:,}",
        f"  a block: {pool.block_size} slots x {memory.slot_bytes:,} = {pool.block_bytes:,}",
    ]
    if memory.memory_bytes is not None and memory.kv_bytes is not None:
        share = "" if memory.free_share == 1 else f" x {memory.free_share:g}"
        lines.append(
            f"  for K and V: ({memory.memory_bytes:,} - {total(memory.weights):,} - {total(memory.activations):,})"
            f"{share} = {memory.kv_bytes:,}"
        )
    return [*lines, *_blocks(plan)]


def _blocks(plan: Plan) -> list[str]:
    config, memory, pool = plan.config, plan.memory, plan.memory.pool
    lines = []
    if memory.kv_bytes is not None:
        affordable = memory.kv_bytes // pool.block_bytes - SPARE_BLOCKS
        lines.append(
            f"  blocks: floor({memory.kv_bytes:,} / {pool.block_bytes:,}) - {SPARE_BLOCKS} spare = {affordable:,}"
        )
    if pool.limited_by == "demand":
        longest = config.max_model_len or plan.model.config.max_position_embeddings
        lines.append(
            f"  more than can be used: {config.max_num_seqs} requests x ceil({longest:,} / {pool.block_size}) = "
            f"{pool.num_blocks:,} blocks"
        )
    lines.append(
        f"  pool: {pool.num_blocks:,} x {pool.block_size} = {pool.num_slots:,} slots, with the spare block "
        f"{pool.num_bytes:,} bytes = {format_memory(pool.num_bytes)}"
    )
    return lines


def _requests(plan: Plan) -> list[str]:
    fit, num_slots = plan.fit, plan.memory.pool.num_slots
    if fit.error is not None:
        return [f"  none: {fit.error}"]
    lines = [
        "  P prompt and n output tokens write P + n - 1 slots: the last token's K and V are never written",
        f"  {fit.num_fit:,} requests write {fit.num_slots_written:,} slots and hold {fit.num_slots_held:,} of "
        f"{num_slots:,}; the next one does not fit",
        f"  run at once: {fit.num_running:,}, limited by {fit.limited_by}",
    ]
    if fit.num_rejected:
        lines.append(f"  rejected, because they can never fit: {fit.num_rejected:,} of the requests before them")
    return lines


def _seconds(plan: Plan) -> list[str]:
    speed = plan.speed
    if speed is None:
        return []
    ttft = "none" if speed.ttft_alone is None else f"{speed.ttft_alone * 1e3:.4g} ms"
    return [
        "Seconds, from the cost model",
        *(f"  {name}: {value}" for name, value in speed.constants),
        f"  ITL of {speed.batch_size} requests, half way through their outputs, {speed.num_context:,} tokens of K and "
        f"V read: {speed.itl * 1e3:.4g} ms; {speed.batch_size} / {speed.itl * 1e3:.4g} ms = "
        f"{speed.decode_tokens_per_s:,.4g} output tokens/s",
        f"  all at their last token: {speed.itl_longest * 1e3:.4g} ms",
        f"  TTFT of one request of mean lengths alone, simulated: {ttft}",
        f"  under load: {speed.load}, simulated with the engine's own scheduler",
    ]
