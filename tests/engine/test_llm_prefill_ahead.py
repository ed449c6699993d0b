"""Prompts ahead of a seat on a real model: the same answers, and what they say of how long they stood."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.errors import ConfigError
from native import why_not

PROMPTS = [[5 + index] * (1 + 7 * (index % 4)) for index in range(9)]
WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunks": {"max_num_batched_tokens": 5},
    "short memory": {"num_kv_blocks": 12, "enable_prefix_caching": False},
    "priority": {"scheduling_policy": "priority"},
    "fair": {"scheduling_policy": "fair"},
    "reserved": {"kv": "exact"},
}


def llm(folder: Path, **options: Any) -> LLM:
    limits = {"num_kv_blocks": 128, "block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 24}
    return LLM(str(folder), skip_tokenizer_init=True, num_threads=1, **{**limits, **options})


def answers(folder: Path, **options: Any) -> list[RequestOutput]:
    """Greedy and random in turns, some with log-probabilities."""
    params = [
        SamplingParams(
            temperature=float(index % 2), seed=index, max_tokens=12, ignore_eos=True, logprobs=2 if index % 3 else None
        )
        for index in range(len(PROMPTS))
    ]
    return llm(folder, **options).generate(PROMPTS, params, progress=False)


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    return [one.logprob for output in outputs for each in output.outputs[0].logprobs or [] for one in each.top]


@pytest.mark.parametrize("way", WAYS)
def test_the_answers_are_the_same(way: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir("llama")
    seated, ahead = (answers(folder, **WAYS[way], prefill_ahead=number) for number in (0, 5))
    assert [output.outputs[0].token_ids for output in ahead] == [output.outputs[0].token_ids for output in seated]
    exactly = 0.0 if why_not() is None else 1e-4  # torch's kernels add in an order that depends on the batch
    assert logprobs(ahead) == pytest.approx(logprobs(seated), rel=0, abs=exactly)
    stood = [output.stats.steps_stood for output in ahead if output.stats is not None]
    assert sum(stood) > 10
    assert len(stood) == len(PROMPTS)
    assert not any(output.stats.steps_stood for output in seated if output.stats is not None)


def test_nobody_waits_for_the_answers_of_others_before_its_first_token(tiny_model_dir: Callable[..., Path]) -> None:
    """In steps, since seconds depend on the machine: two seats and seven places for nine requests."""
    folder = tiny_model_dir("llama")
    seated, ahead = (answers(folder, prefill_ahead=number) for number in (0, 7))
    waits = [[sum(o.stats.steps_waited.values()) for o in outputs if o.stats] for outputs in (seated, ahead)]
    assert max(waits[1]) < 8 < max(waits[0])


def test_the_engine_says_how_many_go_ahead(
    tiny_model_dir: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "chairlift"):
        engine = llm(tiny_model_dir("llama"), prefill_ahead=3).engine
    assert "seats for 2, and 3 requests ahead of one" in caplog.text
    assert (engine.started.max_num_seqs, engine.started.prefill_ahead) == (2, 3)


def test_the_pool_has_room_for_those_ahead(tiny_model_dir: Callable[..., Path]) -> None:
    def blocks(prefill_ahead: int) -> int:
        options = {"num_kv_blocks": None, "kv_cache_memory": 1 << 30, "max_model_len": 64}
        return llm(tiny_model_dir("llama"), prefill_ahead=prefill_ahead, **options).engine.kv_cache_plan.num_blocks

    assert (blocks(0), blocks(3)) == (2 * 8, 5 * 8)


def test_static_batches_refuse_it(tiny_model_dir: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="prefill_ahead=3 is for batching=continuous"):
        llm(tiny_model_dir("llama"), batching="static", prefill_ahead=3)
