"""The engine with interpreted Triton kernels generates the greedy tokens of transformers.

The prompts are computed in chunks, some of them begin with cached blocks, requests are preempted, and draft tokens are
verified.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import build_engine
from chairlift.events import EventList, RequestFinished, Step
from support.tiny_models import load_reference

NEW_TOKENS = 8
SQUEEZED: dict[str, Any] = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "speculative_config": {"method": "ngram", "prompt_lookup_min": 1},
}
NUM_BLOCKS = {"llama": 14, "mixtral": 14, "gpt_oss": 24, "granite4_h": 14}
"""The blocks of each architecture, which are too few for four requests."""


def make_prompts() -> list[list[int]]:
    """Prompts that repeat themselves, with a common beginning or none, and the first of them again."""
    rng = random.Random(7)
    common = [rng.randrange(3, 256) for _ in range(9)] * 2
    return [[*common, 9], [rng.randrange(3, 256)] * 13, [5, 6, 7, 5, 6], [*common, 10, 11], [*common, 9]]


def generate(folder: Path, **options: Any) -> tuple[list[list[int]], EventList]:
    defaults: dict[str, Any] = {"block_size": 4, "max_model_len": 40, "dtype": "float32"}
    config = EngineConfig(model=str(folder), skip_tokenizer_init=True, num_threads=1, **{**defaults, **options})
    events = EventList()
    with patch.object(decoder_engine, "measured_row_time", lambda *_: None):
        llm = LLM(engine=build_engine(config, events=events))
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(make_prompts(), params, use_tqdm=False)
    llm.close()
    return [output.outputs[0].token_ids for output in outputs], events


@torch.inference_mode()
def likeliest(reference: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of an answer, given those before it."""
    found: list[int] = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(dim=1).tolist()
    return found


@pytest.mark.parametrize("arch", NUM_BLOCKS)
def test_greedy_tokens_are_those_of_transformers(arch: str, tiny_model_dir: Callable[..., Path]) -> None:
    folder = tiny_model_dir(arch)
    tokens, events = generate(folder, kernels="triton", num_kv_blocks=NUM_BLOCKS[arch], **SQUEEZED)
    reference = load_reference(folder)
    for prompt, answer in zip(make_prompts(), tokens, strict=True):
        assert len(answer) == NEW_TOKENS
        assert answer == likeliest(reference, prompt, answer)
    steps = [event for event in events.events if isinstance(event, Step)]
    spans = [span for step in steps for span in zip(step.num_scheduled, step.num_computed, strict=True)]
    assert any(count > 1 and computed > 0 for count, computed in spans), "a chunk"
    assert any(event.num_cached_tokens for event in events.events if isinstance(event, RequestFinished))
    assert sum(len(step.preempted) for step in steps) > 0
    assert sum(sum(step.num_draft) for step in steps) > 0
