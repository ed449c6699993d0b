from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import EngineConfig
from chairlift.core.baselines.arena import BuddyArena
from chairlift.core.kv.kv_groups import FULL
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup import pool_plan
from chairlift.engine.startup.pool_plan import CacheSizes, checkpoint_interval, plan_pool
from chairlift.errors import ConfigError

CONTEXT = 512
SLOT_BYTES = 3 * 2 * 2 * 8 * 4
BLOCK_BYTES = 16 * SLOT_BYTES


def _plan(memory_bytes: int, max_num_seqs: int = 8, max_model_len: int | None = None, kv: str = "paged") -> KVCachePlan:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, kv=kv)
    return plan_pool(config, CacheSizes(CONTEXT, SLOT_BYTES), memory_bytes)


def test_the_pool_has_as_many_blocks_as_fit_in_the_budget() -> None:
    plan = _plan(11 * BLOCK_BYTES + 5)
    assert plan == KVCachePlan(10, 16, BLOCK_BYTES, "memory")
    assert (plan.num_slots, plan.num_bytes) == (160, 11 * BLOCK_BYTES)


def test_the_pool_has_no_more_blocks_than_can_be_used() -> None:
    assert _plan(1 << 40) == KVCachePlan(8 * 32, 16, BLOCK_BYTES, "demand")
    assert _plan(1 << 40, max_num_seqs=3, max_model_len=17) == KVCachePlan(6, 16, BLOCK_BYTES, "demand")


def test_half_the_bytes_per_slot_give_twice_the_blocks() -> None:
    plan = plan_pool(EngineConfig(max_num_seqs=8), CacheSizes(CONTEXT, SLOT_BYTES // 2), 10 * BLOCK_BYTES)
    assert plan.num_blocks == 19


@given(st.integers(2, 500), st.integers(1, 40), st.integers(2, 512))
def test_the_pool_never_exceeds_the_budget(blocks: int, max_num_seqs: int, max_model_len: int) -> None:
    memory_bytes = blocks * BLOCK_BYTES + 100
    try:
        plan = _plan(memory_bytes, max_num_seqs, max_model_len)
    except ConfigError:
        assert (blocks - 1) * 16 < max_model_len
    else:
        assert plan.num_bytes <= memory_bytes
        assert max_model_len <= plan.num_slots <= max_num_seqs * (max_model_len + 15)


def test_a_budget_below_one_block_raises_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"holds 0 blocks.*each of 16 slots and 6 KiB.*set kv_cache_memory_bytes to at least 12 KiB"
    ):
        _plan(BLOCK_BYTES)


def test_a_budget_below_one_sequence_raises_an_error() -> None:
    with pytest.raises(ConfigError, match=r"holds 4 blocks.*64 tokens.*max_model_len=65 needs 5 blocks.*at most 64"):
        _plan(5 * BLOCK_BYTES, max_model_len=65)


def test_the_plan_includes_the_rounding_of_the_allocator() -> None:
    plan = _plan(1 << 40, max_num_seqs=3, max_model_len=100, kv="exact")
    assert plan.num_blocks == 3 * 8, "7 blocks would have 4 as their largest piece"
    assert BuddyArena(plan.num_blocks).largest_piece >= 8
    with pytest.raises(ConfigError, match=r"holds 7 blocks.*max_model_len=100 needs 8 blocks.*at most 64"):
        _plan(8 * BLOCK_BYTES, max_model_len=100, kv="exact")


def test_the_default_budget_is_a_share_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_plan, "available_memory", lambda device: 1000)
    assert pool_plan.default_memory_bytes(torch.device("cpu")) == 250
    assert pool_plan.default_memory_bytes(torch.device("cuda")) == 900


def test_a_checkpoint_takes_as_much_as_k_and_v_of_its_interval() -> None:
    assert checkpoint_interval(16, block_bytes=1000, state_bytes=10) == 16, "each block"
    assert checkpoint_interval(16, block_bytes=1000, state_bytes=10_001) == 11 * 16
    assert checkpoint_interval(16, block_bytes=1000, state_bytes=1 << 30) == 1024
    assert checkpoint_interval(2048, block_bytes=1000, state_bytes=1 << 30) == 2048


@pytest.mark.parametrize("num_drafts", [0, 3, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_states_blocks_and_checkpoints_share_one_budget(caching: bool, num_drafts: int) -> None:
    speculative = {"num_speculative_tokens": num_drafts} if num_drafts else None
    config = EngineConfig(
        max_num_seqs=4, enable_prefix_caching=caching, max_model_len=CONTEXT, speculative_config=speculative
    )
    state_bytes = (3 if num_drafts == 0 else 2) * BLOCK_BYTES
    plan = plan_pool(config, CacheSizes(CONTEXT, SLOT_BYTES, FULL, state_bytes), 100 * BLOCK_BYTES)
    assert plan.num_states == 4
    assert plan.num_draft_states == num_drafts, "as many as rows of logits, without the one after the last known token"
    assert plan.num_bytes <= 100 * BLOCK_BYTES
    assert plan.running_state_bytes == (4 + num_drafts) * state_bytes
    assert plan.num_blocks == (100 - plan.running_state_bytes // BLOCK_BYTES) // (2 if caching else 1) - 1
    assert plan.num_checkpoints == (plan.num_blocks * BLOCK_BYTES // state_bytes if caching else 0)


def test_checkpoints_use_their_half_of_a_budget_that_blocks_do_not_need() -> None:
    config = EngineConfig(max_num_seqs=1, max_model_len=CONTEXT, kv_cache_memory_bytes=1000 * BLOCK_BYTES)
    plan = plan_pool(config, CacheSizes(CONTEXT, SLOT_BYTES, FULL, 100 * BLOCK_BYTES), 0)
    assert plan.limited_by == "demand"
    assert plan.num_checkpoints == min(4, plan.num_blocks), "450 blocks, while the blocks of one request are fewer"
    assert plan.num_bytes <= 1000 * BLOCK_BYTES


def test_a_draft_model_has_states_of_its_own() -> None:
    config = EngineConfig(max_num_seqs=4, max_model_len=CONTEXT, speculative_config={"model": "smaller"})
    sizes = CacheSizes(CONTEXT, SLOT_BYTES, FULL, 2 * BLOCK_BYTES, draft_state_bytes=BLOCK_BYTES)
    pair = plan_pool(config, sizes, 100 * BLOCK_BYTES)
    assert pair.running_state_bytes == (4 + 4) * 3 * BLOCK_BYTES
    assert pair.num_bytes <= 100 * BLOCK_BYTES
    alone = plan_pool(config, replace(sizes, state_bytes=0), 100 * BLOCK_BYTES)
    assert (alone.num_checkpoints, alone.num_blocks) == (0, 100 - 8 - 1), "only the draft model has states"
