"""Beam search gives the sequences of transformers, on tiny random models in float32, alone and in a crowd."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup.factory import build_engine
from chairlift.errors import RequestError
from chairlift.events import EventList, Step

NEW_TOKENS = 12
WIDTHS = (2, 4, 8)
EOS = (5, 9)
RULES: dict[str, dict[str, Any]] = {
    "default": {},
    "early": {"early_stopping": True, "length_penalty": 0.0},
    "never": {"early_stopping": "never", "length_penalty": 2.0},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(10, 256) for _ in range(length)] for length in (1, 7, 16, 33)]


@cache
def reference(folder: Path, width: int, rule: str, has_eos: bool) -> list[list[list[int]]]:
    """The answers of transformers to each prompt, the best one first, without padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        eos_token_id=list(EOS) if has_eos else None,
        pad_token_id=0,
        bos_token_id=1,
        **RULES[rule],
    )
    answers = []
    for prompt in make_prompts():
        rows = model.generate(torch.tensor([prompt]))[:, len(prompt) :].tolist()
        answers.append([_until_end(row) if has_eos else row for row in rows])
    return answers


def _until_end(tokens: list[int]) -> list[int]:
    ends = (index for index, token in enumerate(tokens, 1) if token in EOS)
    return tokens[: next(ends, len(tokens))]


def make_llm(folder: Path, **options: Any) -> tuple[LLM, EventList]:
    events = EventList()
    config = EngineConfig(
        str(folder),
        skip_tokenizer_init=True,
        num_threads=1,
        **{"num_kv_blocks": 400, "kv_cache_dtype": "float32", **options},
    )
    return LLM(engine=build_engine(config, events=events)), events


def answers(llm: LLM, width: int, rule: str, has_eos: bool, num_others: int = 0) -> list[list[list[int]]]:
    """The answers of the engine, which also computes other requests that arrive before."""
    params = SamplingParams(
        n=width,
        use_beam_search=True,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        stop_token_ids=EOS if has_eos else (),
        **RULES[rule],
    )
    others = [[100 + number] * 20 for number in range(num_others)]
    other_params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = make_prompts()
    all_params = [*[other_params] * num_others, *[params] * len(prompts)]
    outputs = llm.generate([*others, *prompts], all_params, use_tqdm=False)
    assert llm.engine.core.scheduler.is_idle
    return [[answer.token_ids for answer in output.outputs] for output in outputs[num_others:]]


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3", "opt", "olmoe"])
def test_sequences_are_those_of_transformers(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir(arch)
    llm, _ = make_llm(folder)
    for width in WIDTHS:
        assert answers(llm, width, "default", has_eos=False) == reference(folder, width, "default", False), width


@pytest.mark.parametrize("rule", RULES)
def test_beams_end_as_those_of_transformers(rule: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("llama")
    expected = reference(folder, 4, rule, True)
    llm, _ = make_llm(folder)
    assert answers(llm, 4, rule, has_eos=True) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 100, "block_size": 4, "max_num_seqs": 32, "max_num_batched_tokens": 40},
        {"num_kv_blocks": 100, "block_size": 4, "max_num_seqs": 32, "preemption_mode": "swap", "swap_space": 0.001},
        {"kernels": "torch", "enable_prefix_caching": False, "block_size": 2, "num_kv_blocks": 300},
    ],
    ids=str,
)
def test_beams_in_a_crowd_are_those_of_transformers(
    options: dict[str, Any], tiny_model_dir: Callable[..., Path]
) -> None:
    folder = tiny_model_dir("llama")
    llm, events = make_llm(folder, **options)
    found = answers(llm, 8, "default", has_eos=False, num_others=8 if "max_num_seqs" in options else 0)
    assert found == reference(folder, 8, "default", False)
    steps = [event for event in events.events if isinstance(event, Step)]
    assert max(step.saved for step in steps) > 0
    if "max_num_seqs" in options:
        assert sum(len(step.preempted) for step in steps) > 0


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"top_p": 0.9}, "top_p cannot be combined with use_beam_search"),
        ({"temperature": 0.7}, r"temperature=0\.7 cannot be combined with use_beam_search: remove it, or set it to 0"),
        ({"stop": "x"}, "stop cannot be combined"),
        ({"n": 33}, "n must be between 1 and 32"),
        ({"stop_token_ids": list(range(64))}, "stop_token_ids must have fewer than 64 token ids"),
        ({"early_stopping": "sometimes"}, 'early_stopping must be true, false or "never"'),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number"),
        ({"length_penalty": 10.5}, r"length_penalty must be in \[-10, 10\]"),
        ({"early_stopping": 1}, "early_stopping must be true, false"),
        ({"use_beam_search": False, "length_penalty": 2.0}, r"length_penalty=2\.0 needs use_beam_search"),
    ],
    ids=str,
)
def test_contradictions_are_rejected(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RequestError, match=match):
        SamplingParams(**{"n": 4, "use_beam_search": True, **fields})


@pytest.mark.parametrize(
    ("arch", "options", "match"),
    [
        ("granite4_h", {}, "layers with recurrent state"),
        ("llama", {"batching": "static"}, "--batching static"),
        ("llama", {"speculative_config": {"method": "ngram"}}, "--speculative-config"),
        ("llama", {"prefix_cache_dir": "folder"}, "--prefix-cache-dir"),
    ],
    ids=str,
)
def test_engines_without_beam_search_reject_it(
    arch: str, options: dict[str, Any], match: str, tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    if "prefix_cache_dir" in options:
        options = {"prefix_cache_dir": tmp_path}
    llm, _ = make_llm(tiny_model_dir(arch), **options)
    with pytest.raises(RequestError, match=f"use_beam_search is not supported: .*{match}"):
        llm.generate([[5, 6]], SamplingParams(n=2, use_beam_search=True), use_tqdm=False)


def test_a_vocabulary_with_fewer_tokens_than_beams_is_an_error(tiny_model_dir: Callable[..., Path]) -> None:
    llm, _ = make_llm(tiny_model_dir("llama", vocab_size=20))
    with pytest.raises(RequestError, match=r"n must be at most \d+, the tokens with which a beam can continue, got 20"):
        llm.generate([[5, 6]], SamplingParams(n=20, use_beam_search=True), use_tqdm=False)
