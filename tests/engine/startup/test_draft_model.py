"""A draft model is loaded beside the model, is checked against it, and changes no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ConfigError
from chairlift.events import EventList, Step
from support.native import needs_native

TinyModelDir = Callable[..., Path]


def config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(model), skip_tokenizer_init=True, num_threads=1, max_model_len=120, **options)


@needs_native
def test_answers_are_those_without_a_draft_model(tiny_model_dir: TinyModelDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_engine, "measured_row_time", lambda *_: None)
    plain = config(tiny_model_dir("llama"), num_kv_blocks=64)
    drafting = replace(plain, speculative_config={"model": str(tiny_model_dir("llama"))})
    other = replace(plain, speculative_config={"model": str(tiny_model_dir("llama", rms_norm_eps=0.1))})
    loaded = load_model(plain)
    prompts = [[5 + i] * (3 + 9 * i) for i in range(6)]
    params = [SamplingParams(temperature=0.5 * (i % 3), max_tokens=40, ignore_eos=True, seed=i) for i in range(6)]
    answers, shares = [], []
    for each in (plain, drafting, other):
        events = EventList()
        llm = LLM(engine=build_engine(each, loaded=loaded, events=events))
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
        steps = [event for event in events.events if isinstance(event, Step)]
        shares.append((sum(step.num_accepted for step in steps), sum(sum(step.num_draft) for step in steps)))
    assert answers[0] == answers[1] == answers[2]
    assert shares[0] == (0, 0)
    assert shares[1][0] == shares[1][1] > 100, "a draft model with the same weights is always right"
    assert 0 < shares[2][0] < shares[2][1]


def test_its_k_and_v_take_a_part_of_the_pool(tiny_model_dir: TinyModelDir) -> None:
    plain = config(tiny_model_dir("llama"), kv_cache_memory_bytes=1 << 20)
    with_draft = replace(plain, speculative_config={"model": str(tiny_model_dir("llama"))})
    engine, drafting = build_engine(plain), build_engine(with_draft)
    assert drafting.facts.kv_cache_plan.block_bytes == 2 * engine.facts.kv_cache_plan.block_bytes
    assert drafting.facts.kv_cache_plan.num_bytes <= 1 << 20


@pytest.mark.parametrize(
    ("arch", "overrides", "message"),
    [
        ("llama", {"vocab_size": 320}, "it has 320 tokens, and .* has 256: use a smaller model of the same family"),
        ("llama", {"max_position_embeddings": 64}, "its context has 64 tokens, fewer than the 120 of a request"),
    ],
)
def test_a_model_that_does_not_fit_is_rejected(
    arch: str, overrides: dict[str, Any], message: str, tiny_model_dir: TinyModelDir
) -> None:
    draft = tiny_model_dir(arch, **overrides)
    with pytest.raises(ConfigError, match=message):
        build_engine(config(tiny_model_dir("llama"), num_kv_blocks=16, speculative_config={"model": str(draft)}))


def test_windows_that_release_blocks_are_rejected(tiny_model_dir: TinyModelDir) -> None:
    model = tiny_model_dir("gemma3")
    options = config(model, num_kv_blocks=64, speculative_config={"model": str(model)})
    with pytest.raises(ConfigError, match="set disable_hybrid_kv_cache_manager, or use method=ngram"):
        build_engine(options)
    build_engine(replace(options, disable_hybrid_kv_cache_manager=True))
