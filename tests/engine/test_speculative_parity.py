"""Speculative decoding changes no answer, whatever the parameters of the requests are.

The requests are greedy or random, with filters, penalties, logprobs, grammars, stop strings, bad words and several
answers. All draft tokens are verified, whether they pay or not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from chairlift import LLM, EngineConfig, RequestOutput, SamplingParams
from chairlift.engine.startup import decoder_engine
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedModel, load_model
from chairlift.events import EventList, Step
from chairlift.structured_outputs import StructuredOutputs
from support.native import needs_native

pytestmark = needs_native

TEXT: Final = Path(__file__).parents[2] / "benchmarks" / "data" / "alice.txt"
CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
MIXED: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.9, "min_p": 0.05, "logprobs": 0},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0, "structured_outputs": StructuredOutputs(json=CITY)},
    {"temperature": 0.8, "structured_outputs": StructuredOutputs(regex=r"(the |a |and )+end")},
    {"temperature": 0, "structured_outputs": StructuredOutputs(choice=["the White Rabbit", "the White Queen"])},
    {"temperature": 0, "stop": [".", "Alice"]},
    {"temperature": 0, "n": 3},
    {"temperature": 0.8, "n": 3, "logprobs": 1},
    {"temperature": 0, "bad_words": ["the", "Rabbit"]},
    {"temperature": 0, "min_tokens": 9, "logit_bias": {"0": 5.0}},
    {"temperature": 0, "prompt_logprobs": 1, "logprobs": 1},
)


def make_prompts(num_requests: int, seed: int = 0) -> list[str]:
    """Passages of a story. Half of them are repeated within the prompt, so that the model copies them."""
    text, rng = TEXT.read_text(), random.Random(seed)
    prompts = []
    for index in range(num_requests):
        start, length = rng.randrange(len(text) - 1000), rng.randrange(20, 160)
        passage = text[start : start + length]
        prompts.append(f"{passage}\n\n{passage}\n\n{passage[: length // 3]}" if index % 2 else passage)
    return prompts


def make_params(num_requests: int, max_tokens: int) -> list[SamplingParams]:
    """The parameters of the requests, which repeat those in MIXED."""
    return [
        SamplingParams(**{"max_tokens": max_tokens, "seed": index, **MIXED[index % len(MIXED)]})
        for index in range(num_requests)
    ]


def make_llm(loaded: LoadedModel, config: EngineConfig, events: EventList) -> LLM:
    """An LLM that verifies all draft tokens, whether they pay or not."""
    with patch.object(decoder_engine, "measured_row_time", lambda *_: None):
        return LLM(engine=build_engine(config, loaded=loaded, events=events))


def differences(expected: Sequence[RequestOutput], found: Sequence[RequestOutput]) -> list[str]:
    """A line for each answer that differs."""
    lines = []
    for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        for name in ("outputs", "prompt_logprobs"):
            one, other = getattr(ours, name), getattr(theirs, name)
            if one != other:
                lines.append(f"request {index}, {name}: {one!r:.300} and {other!r:.300}")
    return lines


def test_answers_are_those_without_speculative_decoding(smollm2_gguf: Path) -> None:
    """Together without draft tokens, together with them, and one after the other with them."""
    config = EngineConfig(model=str(smollm2_gguf), num_kv_blocks=600, max_model_len=1024, max_num_seqs=8, num_threads=1)
    loaded, events = load_model(config), EventList()
    prompts, params = make_prompts(len(MIXED)), make_params(len(MIXED), 12)
    expected = make_llm(loaded, config, EventList()).generate(prompts, params, use_tqdm=False)
    llm = make_llm(loaded, replace(config, speculative_config={"method": "ngram", "prompt_lookup_min": 1}), events)
    together = llm.generate(prompts, params, use_tqdm=False)
    alone = [
        output
        for prompt, param in list(zip(prompts, params, strict=True))[::3]
        for output in llm.generate([prompt], [param], use_tqdm=False)
    ]
    assert differences(expected, together) + differences(expected[::3], alone) == []
    steps = [event for event in events.events if isinstance(event, Step)]
    assert 0 < sum(step.num_accepted for step in steps) < sum(sum(step.num_draft) for step in steps)
