"""The plan of KV memory: the blocks of the pool, the recurrent states beside it, and the swap space."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from chairlift.config import EngineConfig
from chairlift.core.baselines.arena import ARENAS
from chairlift.core.factory import KVPool
from chairlift.core.kv.kv_groups import FULL, KVGroups
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.errors import ConfigError
from chairlift.kernels.kernel_memory import DTYPE_BYTES, SPARE_BLOCKS
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.kv_layout import KVLayout
from chairlift.policy_class import is_paged
from chairlift.system.memory_amounts import format_memory
from chairlift.worker.memory import available_memory

if TYPE_CHECKING:
    import torch

FREE_MEMORY_SHARE: Final = {"cpu": 0.25, "cuda": 0.9}
"""The default share of the free memory for K and V. The rest is for activations, and on a CPU for other processes as
well; a GPU is assumed to have none."""

KV_DTYPE_BYTES: Final = {**DTYPE_BYTES, "int8": 1}

INT8_SCALE_BYTES: Final = 4
"""A float32 scale for the key and one for the value of each token and KV head."""

MAX_CHECKPOINT_INTERVAL: Final = 1024
"""Maximum number of tokens between the checkpoints of a long sequence."""

NO_POOL: Final = KVCachePlan(0, 1, 0, "demand")
"""The pool of an encoder, which keeps no K and V."""


def kv_slot_bytes(config: ModelConfig, kv_cache_dtype: str, layout: KVLayout | None = None) -> int:
    """Bytes of K and V of one token, with scales, in the layers of one group of `layout`, or in all layers.

    Args:
        kv_cache_dtype: a key of KV_DTYPE_BYTES.
    """
    specs = (layout or KVLayout.one_group(config)).positions(config)
    num_scales = sum(spec.num_kept_memories * spec.num_kept_kv_heads for spec in specs)
    scales = INT8_SCALE_BYTES * num_scales if kv_cache_dtype == "int8" else 0
    return sum(spec.num_kept_values for spec in specs) * KV_DTYPE_BYTES[kv_cache_dtype] + scales


def sequence_state_bytes(config: ModelConfig) -> int:
    """Bytes of the recurrent state of one sequence in all layers; 0 if the model has no recurrent layers."""
    return config.state_values_per_sequence * DTYPE_BYTES["float32"]


def plan_layout(config: EngineConfig, model_config: ModelConfig) -> KVLayout:
    """The groups of layers, each of which has a block table for every request.

    Reservations have one group, because they never release a slot before their request has finished. Models with
    recurrent layers have one, because their prefixes are shared only at a checkpoint. The groups do not depend on
    `max_model_len`, so a number of blocks is the same memory whatever its value is.
    """
    has_one_table = not is_paged(config.kv) or config.disable_hybrid_kv_cache_manager
    if has_one_table or model_config.state_values_per_sequence:
        return KVLayout.one_group(model_config)
    return KVLayout.by_window(model_config, model_config.max_position_embeddings)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The sizes of what a model keeps for its requests, and of what a draft model keeps in the same blocks.

    Attributes:
        context: the model's maximum number of tokens.
        slot_bytes: bytes of K and V of one token in the layers of one group.
        windows: the window of each group of layers.
        state_bytes: bytes of the recurrent state of one sequence; 0 for a model without recurrent layers.
        draft_slot_bytes, draft_state_bytes: the same of the draft model, in all of its layers; 0 without one.
    """

    context: int
    slot_bytes: int
    windows: tuple[int | None, ...] = FULL
    state_bytes: int = 0
    draft_slot_bytes: int = 0
    draft_state_bytes: int = 0

    @classmethod
    def of_model(cls, model: ModelConfig, kv_cache_dtype: str, layout: KVLayout) -> CacheSizes:
        """The sizes of a model without a draft model."""
        slot_bytes = kv_slot_bytes(model, kv_cache_dtype, layout)
        return cls(model.max_position_embeddings, slot_bytes, layout.windows, sequence_state_bytes(model))

    def with_draft(self, draft: ModelConfig, kv_cache_dtype: str) -> CacheSizes:
        """The sizes of a model together with a draft model."""
        slot_bytes, state_bytes = kv_slot_bytes(draft, kv_cache_dtype), sequence_state_bytes(draft)
        return replace(self, draft_slot_bytes=slot_bytes, draft_state_bytes=state_bytes)


def plan_pool(config: EngineConfig, sizes: CacheSizes, memory_bytes: int) -> KVCachePlan:
    """Plan the blocks of K and V, beside them the recurrent states of running requests and of checkpoints, and the swap
    space.

    The budget is `kv_cache_memory_bytes`, or else `memory_bytes`. A cache full of long prefixes has as many bytes of K
    and V as of checkpoints (see `checkpoint_interval`), so each gets half of what running requests leave. These have a
    state each, and one for each draft token of a step.

    Raises:
        ConfigError: the budget does not hold one sequence of `max_model_len` tokens; or one block, if `max_model_len`
            is None, because the caller then lowers it to the size of the pool.
    """
    each = sizes.state_bytes + sizes.draft_state_bytes
    if not each:
        return _with_swap_space(config, _plan_blocks(config, sizes, memory_bytes))
    num_drafts = 0 if config.speculative is None else config.scheduler_config(sizes.context).max_logit_rows - 1
    budget, running = config.kv_cache_memory_bytes or memory_bytes, (config.max_num_seqs + num_drafts) * each
    kept = max((budget - running) // 2, sizes.state_bytes) if config.has_prefix_cache and sizes.state_bytes else 0
    left = budget - running - kept
    try:
        pool = _plan_blocks(replace(config, kv_cache_memory_bytes=None), sizes, left)
    except ConfigError:
        drafts = f" and of {num_drafts} draft tokens" if num_drafts else ""
        raise ConfigError(
            f"the budget of {format_memory(budget)} for K and V and recurrent states is too small: the states of "
            f"max_num_seqs={config.max_num_seqs} requests{drafts} take {format_memory(running)} "
            f"({format_memory(each)} each), checkpoints of prefixes {format_memory(kept)}, and "
            f"{format_memory(max(0, left))} are left for K and V, which does not hold one request of max_model_len "
            "tokens: lower max_num_seqs or max_model_len, or set a larger kv_cache_memory_bytes"
        ) from None
    # The blocks may need less than their half; a budget that the user has set is for checkpoints then.
    room = kept if config.kv_cache_memory_bytes is not None else pool.num_blocks * pool.block_bytes
    planned = replace(
        pool,
        state_bytes=sizes.state_bytes,
        num_states=config.max_num_seqs,
        num_draft_states=num_drafts,
        num_checkpoints=max(1, min(pool.num_blocks, room // sizes.state_bytes)) if kept else 0,
        checkpoint_interval=checkpoint_interval(config.block_size, pool.block_bytes, sizes.state_bytes),
        draft_model_state_bytes=sizes.draft_state_bytes,
    )
    return _with_swap_space(config, planned)


def _plan_blocks(config: EngineConfig, sizes: CacheSizes, memory_bytes: int) -> KVCachePlan:
    """Plan the blocks: `num_kv_blocks`, or those that fit in the budget, but no more than `max_num_seqs` sequences of
    full length can use. Raises as `plan_pool`."""
    block_size, max_model_len, windows = config.block_size, config.max_model_len, sizes.windows
    block_bytes = (sizes.slot_bytes + sizes.draft_slot_bytes) * block_size
    if config.num_kv_blocks is not None:
        return KVCachePlan(config.num_kv_blocks, block_size, block_bytes, "num_kv_blocks", windows)
    rounded = int if is_paged(config.kv) else ARENAS[config.kv_arena](1).rounded_size
    groups = KVGroups(windows, block_size, config.largest_token_budget)
    memory_bytes = config.kv_cache_memory_bytes or memory_bytes
    affordable = max(0, memory_bytes // block_bytes - SPARE_BLOCKS)
    blocks_per_seq = rounded(sum(groups.most_blocks(max_model_len or sizes.context)))
    needed = len(windows) if max_model_len is None else blocks_per_seq
    if affordable >= needed:
        usable = config.max_num_seqs * blocks_per_seq
        limited_by = "memory" if affordable < usable else "demand"
        return KVCachePlan(min(affordable, usable), block_size, block_bytes, limited_by, windows)
    spare = f"and {SPARE_BLOCKS} spare block, each of {block_size} slots and {format_memory(block_bytes)}"
    budget = f"the KV memory budget of {format_memory(memory_bytes)} holds {affordable} blocks ({spare})"
    required = f"set kv_cache_memory_bytes to at least {format_memory((needed + SPARE_BLOCKS) * block_bytes)}"
    if max_model_len is None or not affordable:
        raise ConfigError(f"{budget}, but {needed} are needed: {required}, or lower block_size")
    whole = next((blocks for blocks in range(affordable, 0, -1) if rounded(blocks) <= affordable), 0)
    longest = groups.max_tokens(whole, max_model_len)
    raise ConfigError(
        f"{budget}, at most {longest} tokens for one request, but max_model_len={max_model_len} needs {needed} blocks: "
        f"{required}, or max_model_len to at most {longest}"
    )


def default_memory_bytes(device: torch.device) -> int:
    """The default budget: FREE_MEMORY_SHARE of the free memory. Call it after the weights are loaded."""
    return int(available_memory(device) * FREE_MEMORY_SHARE[device.type])


def swap_bytes_in(config: EngineConfig, device: str) -> int:
    """The bytes of the swap space in the memory of the device, which is host memory if it is the CPU."""
    return config.swap_bytes if device == "cpu" else 0


def _with_swap_space(config: EngineConfig, pool: KVCachePlan) -> KVCachePlan:
    """The pool with as many blocks of swap space as its size in the configuration holds.

    Raises:
        ConfigError: it holds no block, or the model keeps more than K and V in one group of layers.
    """
    if config.preemption_mode != "swap":
        return pool
    problem = None
    if pool.state_bytes and not pool.num_checkpoints:
        problem = (
            "has layers with recurrent state, and no checkpoints of it without the prefix cache: set "
            "enable_prefix_caching, or preemption_mode=recompute"
        )
    elif pool.windows != FULL:
        problem = "has layers with sliding windows: set preemption_mode=recompute, or disable_hybrid_kv_cache_manager"
    if problem is not None:
        raise ConfigError(f"preemption_mode=swap does not support {config.model!r}, because it {problem}")
    if config.swap_bytes < pool.block_bytes:
        raise ConfigError(
            f"swap_space={config.swap_bytes / (1 << 30):g} GiB does not hold a block, which takes "
            f"{format_memory(pool.block_bytes)}: raise swap_space, or set preemption_mode=recompute"
        )
    return replace(pool, num_swap_blocks=config.swap_bytes // pool.block_bytes)


def beam_search_problem(config: EngineConfig, pool: KVCachePlan) -> str | None:
    """Why an engine has no beam search, with what to do; None if it has."""
    if pool.state_bytes:
        return "the model has layers with recurrent state: leave use_beam_search out"
    conflicts = {
        f"--kv {config.kv}": not is_paged(config.kv),
        f"--batching {config.batching}": config.batching != "continuous",
        "--speculative-config": config.speculative is not None,
        "--prefix-cache-dir": config.prefix_cache_dir is not None,
    }
    return next((f"the engine runs with {name}: remove it" for name, is_given in conflicts.items() if is_given), None)


def checkpoint_interval(block_size: int, block_bytes: int, state_bytes: int) -> int:
    """The tokens between the checkpoints of a long sequence: as many as have K and V of the size of a state.

    They are at most MAX_CHECKPOINT_INTERVAL, because the second request with a prefix computes up to so many again.
    """
    return block_size * max(1, min(-(-state_bytes // block_bytes), MAX_CHECKPOINT_INTERVAL // block_size))


def planned_pool(config: EngineConfig, context: int, plan: KVCachePlan) -> KVPool:
    """The pool of a plan with the policy of `config`. The default of `max_model_len` is the smaller of the model's
    context and the slots that one request can hold.

    Raises:
        ConfigError: `max_model_len` exceeds one of them.
    """
    num_blocks, windows = plan.num_blocks, plan.windows
    pool = KVPool(
        num_blocks,
        plan.block_size,
        config.max_model_len or context,
        config.kv,
        config.kv_arena,
        windows,
        config.largest_token_budget,
        CheckpointPlan(plan.num_checkpoints, plan.checkpoint_interval) if plan.state_bytes else None,
        plan.num_swap_blocks,
        config.prefix_cache_eviction_policy,
    )
    max_slots = pool.max_request_slots
    if max_slots < 2:
        groups = KVGroups(windows, plan.block_size, config.largest_token_budget)
        raise ConfigError(
            f"the KV pool of {num_blocks} blocks x {plan.block_size} slots is too small for one request, because "
            f"each of {len(windows)} groups of layers needs separate blocks: set num_kv_blocks to at least "
            f"{sum(groups.most_blocks(2))}"
        )
    if config.max_model_len is None:
        return replace(pool, max_model_len=min(context, max_slots))
    if config.max_model_len > context:
        raise ConfigError(f"max_model_len={config.max_model_len} exceeds the model's context of {context} tokens")
    if config.max_model_len > max_slots:
        reason = f", because each of {len(windows)} groups of layers needs separate blocks, and those with a window "
        reason += "also blocks for max_num_batched_tokens tokens"
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {max_slots} tokens of one request that the KV pool of "
            f"{num_blocks} blocks x {plan.block_size} can hold under kv={config.kv}"
            f"{'' if windows == FULL else reason}: lower max_model_len, or enlarge the pool"
        )
    return pool
