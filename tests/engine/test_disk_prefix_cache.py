"""Tests the prefix cache on disk with real engines: restarts, other formats, damaged files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder
from chairlift.errors import ConfigError
from chairlift.outputs import RequestOutput
from chairlift.worker.disk_block_store import DiskBlockStore
from support.native import needs_native

PROMPTS = [list(range(1, 60)), [*range(1, 40), 7, 8, 9], [5] * 33]


@pytest.fixture(autouse=True)
def every_block_is_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether reading is faster than computing depends on the machine, and on what else it does."""
    monkeypatch.setattr(DiskBlockStore, "_is_worth_reading", lambda *_: True)


@pytest.fixture
def folder(tiny_model_dir: Callable[..., Path]) -> Path:
    return tiny_model_dir("llama")


def answer(model: Path, **options: Any) -> list[RequestOutput]:
    """Greedy answers of a new engine."""
    options.setdefault("num_kv_blocks", 60)
    llm = LLM(model=str(model), skip_tokenizer_init=True, num_threads=1, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    llm.close()
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "options", [{}, {"kernels": "torch"}, pytest.param({"kv_cache_dtype": "int8"}, marks=needs_native)], ids=str
)
def test_answers_after_a_restart_are_the_same(options: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    expected = answer(folder, **options)
    first, second = (answer(folder, prefix_cache_dir=tmp_path, **options) for _ in range(2))
    assert tokens(first) == tokens(second) == tokens(expected)
    assert [output.num_cached_tokens for output in second] == [48, 32, 32]
    assert first[0].num_cached_tokens == 0


@pytest.mark.parametrize(
    ("arch", "has_predictor"), [("granite4_h", False), ("lfm2", False), ("qwen3_5", False), ("qwen3_5", True)]
)
def test_a_conversation_goes_on_after_a_restart_with_the_same_bits_of_state(
    arch: str, has_predictor: bool, tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All draft tokens are verified: their number would depend on measured times."""
    monkeypatch.setattr(decoder_engine, "measured_row_time", lambda *_: None)
    overrides = {"mtp_num_hidden_layers": 1} if has_predictor else {}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def run_turns(prefix_cache_dir: Path | None, restarts: bool) -> list[tuple[list[int], int, list[torch.Tensor]]]:
        options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "block_size": 8, "max_num_seqs": 1}
        if has_predictor:
            options["speculative_config"] = {"method": "mtp"}
        history: list[int] = []
        turns, engine = [], None
        for turn in range(3):
            if engine is None or restarts:
                config = EngineConfig(
                    str(tiny_model_dir(arch, **overrides)),
                    num_kv_blocks=60,
                    prefix_cache_dir=prefix_cache_dir,
                    **options,
                )
                engine = build_engine(config)
                llm = LLM(engine=engine)
            (output,) = llm.generate([[*history, *range(20 + turn, 39)]], params, use_tqdm=False)
            history = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            assert isinstance(engine.loaded, LoadedDecoder)
            slot = engine.core._executor._rows.state_slots[0]  # type: ignore[attr-defined]
            parts = [
                part[slot].clone() for state in engine.loaded.model.states(0) for part in state if part is not None
            ]
            turns.append((output.outputs[0].token_ids, output.num_cached_tokens, parts))
            if restarts:
                llm.close()
        return turns

    expected, restarted = run_turns(None, restarts=False), run_turns(tmp_path, restarts=True)
    assert [num_cached for _, num_cached, _ in restarted] == [0, 48, 96] == [turn[1] for turn in expected]
    for (tokens_, _, state), (same_tokens, _, same_state) in zip(expected, restarted, strict=True):
        assert same_tokens == tokens_
        assert all(map(torch.equal, same_state, state))
    for file in tmp_path.glob("*/*.kv"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 4
        file.write_bytes(data)
    damaged = run_turns(tmp_path, restarts=True)
    assert [turn[0] for turn in damaged] == [turn[0] for turn in expected]


def test_two_engines_on_one_folder_give_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    """The first one writes, and the second one reads what was there before."""
    expected = tokens(answer(folder))
    answer(folder, prefix_cache_dir=tmp_path)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "num_kv_blocks": 60}
    engines = [LLM(model=str(folder), prefix_cache_dir=tmp_path, **options) for _ in range(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for prompts in (PROMPTS, [[7, *PROMPTS[0]], [8] * 40], PROMPTS):
        first, second = (tokens(engine.generate(prompts, params, use_tqdm=False)) for engine in engines)
        assert first == second
        if prompts is PROMPTS:
            assert first == expected
    for engine in engines:
        engine.close()


@needs_native
def test_another_format_and_another_model_have_other_blocks(
    folder: Path, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    answer(folder, prefix_cache_dir=tmp_path)
    for model, options in (
        (folder, {"kv_cache_dtype": "float32"}),
        (folder, {"quantization": "int8"}),
        (folder, {"block_size": 8, "num_kv_blocks": 120}),
        (tiny_model_dir("llama", rope_theta=20000.0), {}),
    ):
        outputs = answer(model, prefix_cache_dir=tmp_path, **options)
        assert outputs[0].num_cached_tokens == 0
        assert tokens(outputs) == tokens(answer(model, **options))
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 5


def test_a_flipped_bit_costs_time_but_no_token(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = answer(folder, prefix_cache_dir=tmp_path)
    for file in tmp_path.glob("*/*.kv"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 4
        file.write_bytes(data)
    with caplog.at_level("WARNING"):
        outputs = answer(folder, prefix_cache_dir=tmp_path)
    assert tokens(outputs) == tokens(expected)
    assert "is damaged and was removed; its tokens are computed" in caplog.text


@pytest.mark.parametrize("arch", ["gemma3", "gpt_oss"])
def test_a_conversation_with_a_model_with_windows_goes_on_after_a_restart(
    arch: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "block_size": 4, "num_kv_blocks": 300}

    def run_turns(**each: Any) -> list[tuple[list[int], int]]:
        history: list[int] = []
        turns = []
        for turn in range(3):
            llm = LLM(model=str(tiny_model_dir(arch)), **options, **each)
            (output,) = llm.generate([[*history, *range(20 + turn, 60)]], params, use_tqdm=False)
            history = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            turns.append((output.outputs[0].token_ids, output.num_cached_tokens))
            llm.close()
        return turns

    computed, loaded = run_turns(), run_turns(prefix_cache_dir=tmp_path)
    assert [answer for answer, _ in loaded] == [answer for answer, _ in computed]
    assert [num_cached for _, num_cached in loaded] == [0, 68, 136]


def test_options_that_cannot_be_combined(folder: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"kv": "exact"}, "prefix_cache_dir needs the prefix cache"),
        ({"enable_prefix_caching": False}, "prefix_cache_dir needs the prefix cache"),
        ({"device": "cuda"}, "prefix_cache_dir needs device=cpu"),
        ({"prefix_cache_disk_bytes": 0}, "prefix_cache_disk_bytes must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(model=str(folder), prefix_cache_dir=tmp_path, **options)
    with pytest.raises(ConfigError, match="prefix_cache_disk_bytes=5 needs prefix_cache_dir: set it, or remove"):
        LLM(model=str(folder), prefix_cache_disk_bytes=5)
