"""Checks that speculative decoding changes no answer: requests with mixed parameters, with and without it.

    python -m benchmarks.speculation_parity [--model MODEL] [--num-requests 500] [--max-tokens 48] [--alone-share 1.0]

The requests are greedy or random, with filters, penalties, logprobs, grammars, stop strings, bad words and several
answers. They run together without speculative decoding, together with it, and one after the other with it, and all
draft tokens are verified, whether they pay or not. Token ids, texts, finish reasons and logprobs must be equal. The
script prints the number of compared answers and of draft tokens, and ends with an error at the first difference.
"""

from __future__ import annotations

import argparse
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

TEXT: Final = Path(__file__).parent / "data" / "alice.txt"
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
    {"temperature": 0, "min_tokens": 20, "logit_bias": {"0": 5.0}},
    {"temperature": 0, "prompt_logprobs": 1, "logprobs": 1},
)


def make_prompts(num_requests: int, seed: int = 0) -> list[str]:
    """Passages of a story. Half of them are repeated within the prompt, so that the model copies them."""
    text, rng = TEXT.read_text(), random.Random(seed)
    prompts = []
    for index in range(num_requests):
        start, length = rng.randrange(len(text) - 1000), rng.randrange(20, 400)
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


def check(
    loaded: LoadedModel, config: EngineConfig, num_requests: int, max_tokens: int, alone_share: float
) -> dict[str, int]:
    """Run the comparison; returns the numbers of answers and draft tokens. Raises SystemExit at a difference."""
    prompts, params = make_prompts(num_requests), make_params(num_requests, max_tokens)
    events = EventList()
    speculative = replace(config, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    expected = make_llm(loaded, config, EventList()).generate(prompts, params, use_tqdm=False)
    llm = make_llm(loaded, speculative, events)
    together = llm.generate(prompts, params, use_tqdm=False)
    num_alone = round(alone_share * num_requests)
    alone = [
        output
        for prompt, param in list(zip(prompts, params, strict=True))[:num_alone]
        for output in llm.generate([prompt], [param], use_tqdm=False)
    ]
    lines = differences(expected, together) + differences(expected[:num_alone], alone)
    if lines:
        raise SystemExit("\n".join(lines[:10]))
    steps = [event for event in events.events if isinstance(event, Step)]
    return {
        "requests": num_requests,
        "answers compared": sum(len(output.outputs) for output in (*together, *alone)),
        "tokens compared": sum(len(o.token_ids) for output in (*together, *alone) for o in output.outputs),
        "draft tokens": sum(sum(step.num_draft) for step in steps),
        "accepted": sum(step.num_accepted for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--num-requests", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--alone-share", type=float, default=1.0)
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model, quantization=options.quantization, max_model_len=2048, max_num_seqs=options.max_num_seqs
    )
    counts = check(load_model(config), config, options.num_requests, options.max_tokens, options.alone_share)
    for name, count in counts.items():
        print(f"{name}: {count:,}")
    print("no difference")


if __name__ == "__main__":
    main()
