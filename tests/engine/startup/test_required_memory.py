"""Tests the plan of an engine's memory before it is started."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import EngineConfig
from chairlift.core.baselines.arena import BuddyArena
from chairlift.core.kv.kv_groups import FULL
from chairlift.engine.kv_cache_plan import KVCachePlan
from chairlift.engine.startup import pool_plan
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_model
from chairlift.engine.startup.pool_plan import CacheSizes, checkpoint_interval, plan_pool
from chairlift.engine.startup.required_memory import PROCESS_BYTES, SERVER_PROCESSES_BYTES, plan_required_memory
from chairlift.errors import ConfigError, ModelLoadError
from chairlift.loading.gguf_file import GGUFFile
from support.parameter_memory import parameter_bytes
from support.pooling_models import write_pooling_model


@pytest.mark.parametrize("max_loras", [0, 3])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_plan_is_what_the_engine_takes(kernels: str, max_loras: int, tiny_model_dir: Callable[..., Path]) -> None:
    lora = {"max_loras": max_loras, "max_lora_rank": 5} if max_loras else {}
    options: dict[str, Any] = {"kernels": kernels, **lora}
    given = EngineConfig(str(tiny_model_dir("llama")), skip_tokenizer_init=True, num_threads=1, **options)
    config, required = plan_required_memory(given, PROCESS_BYTES + (16 << 20))
    engine = build_engine(config)
    assert required.weights == parameter_bytes(engine.loaded.model)
    assert required.kv_cache == engine.facts.kv_cache_plan.num_bytes
    assert required.total <= PROCESS_BYTES + (16 << 20)


@pytest.mark.parametrize("arch", ["granite4_h", "qwen3_5", "lfm2"])
def test_the_parameters_of_recurrences_are_in_the_plan(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(str(tiny_model_dir(arch)), skip_tokenizer_init=True, num_threads=1, max_num_seqs=2)
    config, required = plan_required_memory(given, PROCESS_BYTES + (64 << 20))
    assert required.weights == parameter_bytes(build_engine(config).loaded.model)


@pytest.mark.parametrize(("arch", "draft"), [("llama", "llama"), ("granite4_h", "lfm2")])
def test_a_draft_model_is_in_the_plan(arch: str, draft: str, tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(
        str(tiny_model_dir(arch)),
        skip_tokenizer_init=True,
        num_threads=1,
        max_num_seqs=2,
        speculative_config={"model": str(tiny_model_dir(draft))},
    )
    config, required = plan_required_memory(given, PROCESS_BYTES + (64 << 20))
    engine = build_engine(config)
    assert isinstance(engine.loaded, LoadedDecoder)
    assert engine.loaded.draft is not None
    models = engine.loaded.model, engine.loaded.draft.model
    assert required.weights == sum(map(parameter_bytes, models))
    assert required.kv_cache == engine.facts.kv_cache_plan.num_bytes
    _, alone = plan_required_memory(replace(given, speculative_config=None), PROCESS_BYTES + (64 << 20))
    assert required.activations > alone.activations


def test_the_metadata_of_a_gguf_file_is_released(smollm2_gguf: Path) -> None:
    def num_open() -> int:
        return sum(isinstance(each, GGUFFile) for each in gc.get_objects())

    gc.collect()
    before, config = num_open(), EngineConfig(str(smollm2_gguf), num_kv_blocks=10)
    plan_required_memory(config, 1 << 30)
    assert num_open() == before
    loaded = load_model(config)
    assert num_open() == before, "weights are copied"
    assert loaded.files == [smollm2_gguf]


def test_the_size_of_the_pool_may_be_given(tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(str(tiny_model_dir("llama")), num_kv_blocks=10)
    config, required = plan_required_memory(given, 1)
    assert config == given
    assert required.total > required.kv_cache > 0


def test_too_little_memory_is_an_error_with_the_numbers(tiny_model_dir: Callable[..., Path]) -> None:
    given = EngineConfig(str(tiny_model_dir("llama")))
    with pytest.raises(
        ConfigError,
        match=r"models_memory_bytes=200 MiB for model 'tiny_.*' leaves nothing for K and V: the weights take",
    ):
        plan_required_memory(given, 200 << 20)
    with pytest.raises(ModelLoadError, match="there is no such file or folder"):
        plan_required_memory(EngineConfig("/nowhere/model"), 1 << 30)


def test_an_encoder_does_not_get_the_options_of_all_models_that_it_lacks(tmp_path: Path) -> None:
    model = str(write_pooling_model(tmp_path / "bert", "bert"))
    common = EngineConfig(kv_cache_memory_bytes=1 << 20, prefix_cache_dir=str(tmp_path), max_num_seqs=3)
    given = replace(common, model=model)
    config, required = plan_required_memory(given, 1 << 30, common)
    assert config == EngineConfig(model, max_num_seqs=3)
    assert required.kv_cache == 0
    build_engine(config)
    with pytest.raises(ConfigError, match="max_loras has no use for 'bert', an encoder: remove it"):
        plan_required_memory(replace(given, max_loras=2), 1 << 30, common)


def test_guides_have_the_planned_memory_of_processes() -> None:
    guides = Path(__file__).parents[3] / "docs" / "guide"
    engine, server = PROCESS_BYTES >> 20, SERVER_PROCESSES_BYTES >> 20
    text = (guides / "several-models.md").read_text(encoding="utf-8")
    assert f"and {engine} MiB for the process of its engine" in text
    assert f"is {server} MiB, because it also has the process that serves HTTP" in text
    rows = re.findall(r"│ processes +│ +([\d,]+) │ +(\d+) │", (guides / "laboratory.md").read_text(encoding="utf-8"))
    assert rows == [(f"{SERVER_PROCESSES_BYTES:,}", str(server))]


CONTEXT = 512
SLOT_BYTES = 3 * 2 * 2 * 8 * 4
BLOCK_BYTES = 16 * SLOT_BYTES


def _plan(memory_bytes: int, max_num_seqs: int = 8, max_model_len: int | None = None, kv: str = "paged") -> KVCachePlan:
    config = EngineConfig(max_num_seqs=max_num_seqs, max_model_len=max_model_len, kv=kv)
    return plan_pool(config, CacheSizes(CONTEXT, SLOT_BYTES), memory_bytes)


def test_the_pool_has_as_many_blocks_as_fit_and_can_be_used() -> None:
    plan = _plan(11 * BLOCK_BYTES + 5)
    assert plan == KVCachePlan(10, 16, BLOCK_BYTES, "memory")
    assert (plan.num_slots, plan.num_bytes) == (160, 11 * BLOCK_BYTES)
    assert _plan(1 << 40) == KVCachePlan(8 * 32, 16, BLOCK_BYTES, "demand")
    assert _plan(1 << 40, max_num_seqs=3, max_model_len=17) == KVCachePlan(6, 16, BLOCK_BYTES, "demand")


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


def test_a_budget_below_one_block_or_sequence_raises_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"holds 0 blocks.*each of 16 slots and 6 KiB.*set kv_cache_memory_bytes to at least 12 KiB"
    ):
        _plan(BLOCK_BYTES)
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
