"""Every option of an engine is used as it is given, is rejected, or has a line with the value that is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.kv.eviction_order import EVICTION_ORDERS
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import ChairliftError
from support.native import needs_native
from support.tiny_engine import tiny_options

Used = Callable[[Engine], object]


def started(name: str) -> Used:
    return lambda engine: getattr(engine.facts.started, name)


def from_file(name: str) -> Used:
    """The path of the file that an engine with the option has created."""
    return lambda engine: next((path for path in [getattr(engine.loaded.engine_config, name)] if path.exists()), None)


def eviction_policy(engine: Engine) -> object:
    pool = engine.core.scheduler._kv.pool  # type: ignore[attr-defined]
    return next(name for name, order in EVICTION_ORDERS.items() if type(pool.order) is order)


USED: dict[str, tuple[dict[str, Any], Used]] = {
    "model": ({}, lambda engine: engine.loaded.engine_config.model),
    "dtype": ({"dtype": "bfloat16"}, lambda engine: str(engine.loaded.choice.dtype).removeprefix("torch.")),
    "kernels": ({"kernels": "torch"}, started("kernels")),
    "quantization": ({"quantization": "int8"}, started("quantization")),
    "kv_cache_dtype": ({"kv_cache_dtype": "int8"}, started("kv_cache_dtype")),
    "max_model_len": ({"max_model_len": 96}, started("max_model_len")),
    "max_num_seqs": ({"max_num_seqs": 3}, started("max_num_seqs")),
    "max_num_batched_tokens": ({"max_num_batched_tokens": 70}, started("max_num_batched_tokens")),
    "scheduling_policy": ({"scheduling_policy": "edf"}, started("scheduling_policy")),
    "tenant_weights": (
        {"tenant_weights": {"a": 2.0}, "scheduling_policy": "fair"},
        lambda engine: engine.facts.scheduler_config.tenant_weights,
    ),
    "pacing_tokens_per_second": ({"pacing_tokens_per_second": 6.0}, started("pacing_tokens_per_second")),
    "length_predictor": ({"length_predictor": "history:0.9"}, started("length_predictor")),
    "batching": ({"batching": "static"}, started("batching")),
    "static_batch_size": ({"static_batch_size": 3, "batching": "static"}, started("static_batch_size")),
    "static_run_to": ({"static_run_to": "global", "batching": "static"}, started("static_run_to")),
    "block_size": ({"block_size": 4}, started("block_size")),
    "num_kv_blocks": ({"num_kv_blocks": 40}, started("num_blocks")),
    "kv": ({"kv": "max"}, started("kv")),
    "kv_arena": ({"kv": "max", "kv_arena": "first-fit"}, started("kv_arena")),
    "prefix_cache_eviction_policy": ({"prefix_cache_eviction_policy": "lru"}, eviction_policy),
    "enable_prefix_caching": ({"enable_prefix_caching": False}, started("enable_prefix_caching")),
    "swap_space": (
        {"swap_space": 0.25, "preemption_mode": "swap"},
        lambda engine: engine.facts.kv_cache_plan.swap_bytes / (1 << 30),
    ),
    "skip_tokenizer_init": (
        {"skip_tokenizer_init": True},
        lambda engine: type(engine.loaded.tokenizer).__name__ == "NoTokenizer",
    ),
    "override_generation_config": (
        {"override_generation_config": {"top_k": 7}},
        lambda engine: engine.facts.sampling_defaults.values(),
    ),
    "speculative_config": (
        {"speculative_config": {"method": "ngram"}},
        lambda engine: {"method": engine.facts.started.speculative_config["method"]},  # type: ignore[index]
    ),
    "max_loras": ({"max_loras": 2}, lambda engine: engine.facts.max_loras),
    "event_log": ({"event_log": Path("events.jsonl")}, from_file("event_log")),
    "record_trace": ({"record_trace": Path("trace.jsonl")}, from_file("record_trace")),
    "prefix_cache_dir": ({"prefix_cache_dir": Path("prefixes")}, from_file("prefix_cache_dir")),
    # These are changed, which a line says.
    "kv_cache_memory_bytes": (
        {"kv_cache_memory_bytes": 500 << 30, "num_kv_blocks": None},
        lambda engine: engine.facts.kv_cache_plan.num_bytes,
    ),
}
"""Option -> the options to give, and the value that the engine uses."""

REJECTED: dict[str, dict[str, Any]] = {
    "device": {"device": "npu"},
    "static_run_to": {"static_run_to": "batch"},
    "static_batch_size": {"static_batch_size": 2},
    "swap_space": {"swap_space": 1.0},
    "tenant_weights": {"tenant_weights": {"a": 2.0}},
    "prefix_cache_disk_bytes": {"prefix_cache_disk_bytes": 1 << 20},
    "kv_arena": {"kv_arena": "first-fit"},
    "enable_kv_cache_events": {"enable_kv_cache_events": True, "kv": "max"},
    "prefix_cache_eviction_policy": {"prefix_cache_eviction_policy": "lru", "enable_prefix_caching": False},
    "enable_prefix_caching": {"enable_prefix_caching": True, "kv": "max"},
    "max_lora_rank": {"max_lora_rank": 64},
    "max_num_seqs": {"max_num_seqs": 10_000_000},
    "max_model_len": {"max_model_len": 513},
    "num_threads": {"num_threads": 257},
    "lora_modules": {"lora_modules": {"a": "/no/such/folder"}},
    "generation_config": {"generation_config": "/no/such/folder"},
    "load_format": {"load_format": "auto"},  # The model has no weights.
    "preemption_mode": {"preemption_mode": "swap", "kv": "max"},
    "classifier_from_token": {"classifier_from_token": ["one"]},
}
"""Options that cannot be used as they are given here."""

OTHER = {
    "accept_terms": "tests/loading/test_loading_fetch.py",
    "disable_hybrid_kv_cache_manager": "tests/engine/test_window_release.py",
    "enforce_eager": "tests/triton_set/test_engine.py",
    "seed": "tests/engine/test_llm.py",
}
"""Options whose influence depends on the model, and the tests that show it."""


def test_every_option_is_in_a_table() -> None:
    assert {each.name for each in fields(EngineConfig)} == USED.keys() | REJECTED.keys() | OTHER.keys()
    root = Path(__file__).parents[3]
    assert all(name in (root / file).read_text(encoding="utf-8") for name, file in OTHER.items())


@needs_native
@pytest.mark.parametrize("name", USED)
def test_options_are_used_as_asked_or_a_line_says_why_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "chairlift")
    monkeypatch.chdir(tmp_path)
    options, used = USED[name]
    base = tiny_options(tmp_path, num_kv_blocks=64, max_num_seqs=16, max_num_batched_tokens=64)
    config = EngineConfig(**{**base, **options})
    engine = build_engine(config)
    try:
        found = used(engine)
    finally:
        engine.close()
    lines = [line for line in caplog.messages if line.startswith(f"{name}=") and " exceeds " in line]
    assert (found == (base | options)[name]) is not bool(lines), (found, lines)


@pytest.mark.parametrize("name", REJECTED)
def test_options_that_cannot_be_used_are_rejected(name: str, tmp_path: Path) -> None:
    base = tiny_options(tmp_path, num_kv_blocks=64, max_num_batched_tokens=64)
    with pytest.raises(ChairliftError) as failed:
        build_engine(EngineConfig(**{**base, **REJECTED[name]}))
    named = {"load_format": "safetensors", "lora_modules": "adapter 'a'"}.get(name, name)
    assert named in str(failed.value)


def test_more_threads_than_cpus_are_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("chairlift.engine.startup.threads.allowed_cpus", lambda: {0})
    build_engine(EngineConfig(**tiny_options(tmp_path, num_kv_blocks=64) | {"num_threads": 2})).close()
    assert "num_threads=2 exceeds the 1 CPUs of this process" in caplog.text
