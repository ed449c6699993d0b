"""Measures the prefix cache of a model with recurrent layers, over its memory and the interval of its checkpoints.

    python -m benchmarks.hybrid_prefix MODEL [--memory-mib 512,2048] [--intervals 128,1024] [--conversations 8]
                                       [--turns 6] [--shared 600] [--turn-tokens 200] [--rounds 3] [--seed 0] [--json]

The requests are conversations that begin with the same `--shared` tokens, turn by turn in rotation: each prompt is
the conversation so far and `--turn-tokens` new ones. They run one after the other, so that TTFT contains no queue.
"no cache" computes every prompt, and all answers must be equal. A turn needs at least its new tokens and those behind
the last whole block. "interval default" is the interval of the memory plan.

"checkpoints cost" is the time to the first token of new prompts with checkpoints every block, relative to none.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.common import print_result, ratios, run_interleaved, spread
from rich.table import Table

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.engine.startup import pool_plan
from chairlift.system.memory_amounts import format_memory

ANSWER_TOKENS = 16
COST_PROMPTS = 3


def main() -> None:
    options = parse_options()
    arms = {"no cache": (options.memory_mib[-1], None, False)}
    for mebibytes in options.memory_mib:
        for interval in [None, *options.intervals]:
            arms[f"{mebibytes} MiB, interval {interval or 'default'}"] = (mebibytes, interval, True)
    runs = run_interleaved(
        {name: partial(converse, options, *arm) for name, arm in arms.items()}, options.rounds, num_warmups=0
    )
    answers = [run["answers"] for results in runs.values() for run in results]
    assert all(answer == answers[0] for answer in answers), "the answers differ"
    costs = run_interleaved(
        {name: partial(new_prompts, options, on) for name, on in (("without", False), ("with", True))},
        options.rounds,
    )
    report(options, runs, costs)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("model")
    parser.add_argument("--memory-mib", type=numbers, default=[512, 2048], help="kv_cache_memory_bytes, ascending")
    parser.add_argument("--intervals", type=numbers, default=[128, 1024], help="tokens, multiples of the block size")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--shared", type=int, default=600)
    parser.add_argument("--turn-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    return parser.parse_args()


@contextmanager
def engine(options: argparse.Namespace, mebibytes: int, interval: int | None, has_cache: bool) -> Iterator[LLM]:
    """An engine with a checkpoint every `interval` tokens, whose pool may hold all conversations."""
    planned = pool_plan.checkpoint_interval if interval is None else lambda *_sizes: interval
    with patch.object(pool_plan, "checkpoint_interval", planned):
        llm = LLM(
            model=options.model,
            load_format=options.load_format,
            skip_tokenizer_init=True,
            num_threads=options.num_threads,
            max_num_seqs=options.conversations,
            max_model_len=options.shared + options.turns * (options.turn_tokens + ANSWER_TOKENS) + 1,
            kv_cache_memory_bytes=mebibytes << 20,
            enable_prefix_caching=has_cache,
        )
    try:
        yield llm
    finally:
        llm.close()


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> RequestOutput:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


def ttft(output: RequestOutput) -> float:
    """The time to the first token in seconds."""
    assert output.times is not None
    assert output.times.first_token is not None
    return output.times.first_token - output.times.arrival


def converse(options: argparse.Namespace, mebibytes: int, interval: int | None, has_cache: bool) -> dict[str, Any]:
    """Run all conversations in a new engine."""
    draw = random.Random(options.seed)
    shared = draw.choices(range(1000, 30000), k=options.shared)
    texts = [list(shared) for _ in range(options.conversations)]
    outputs = []
    with engine(options, mebibytes, interval, has_cache) as llm:
        for _ in range(options.turns):
            for text in texts:
                text += draw.choices(range(1000, 30000), k=options.turn_tokens)
                outputs.append(generate(llm, list(text), ANSWER_TOKENS))
                text += outputs[-1].outputs[0].token_ids
    cached = sum(output.num_cached_tokens for output in outputs)
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    known = prompts - options.turn_tokens * len(outputs) - options.shared
    return {
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "ttft": [ttft(output) for output in outputs],
        "cached_share": cached / known,
        "computed": (prompts - cached) / len(outputs),
        "hits": sum(output.num_cached_tokens > 0 for output in outputs[1:]) / (len(outputs) - 1),
    }


def new_prompts(options: argparse.Namespace, has_checkpoints: bool) -> float:
    """The median time to the first token of prompts that share nothing."""
    draw = random.Random(options.seed)
    with engine(options, options.memory_mib[-1], 16, has_checkpoints) as llm:
        length = options.shared + options.turn_tokens
        prompts = [draw.choices(range(1000, 30000), k=length) for _ in range(COST_PROMPTS)]
        return median([ttft(generate(llm, prompt, 1)) for prompt in prompts])


def report(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], costs: dict[str, list[float]]) -> None:
    table = Table("prefix cache", "turns with a hit, %", "known tokens cached, %", "computed per turn", "TTFT p50, ms")
    records = []
    for name, results in runs.items():
        first = results[0]
        times = [1000 * median(run["ttft"]) for run in results]
        shares = [f"{100 * first[key]:.1f}" for key in ("hits", "cached_share")]
        table.add_row(name, *shares, f"{first['computed']:.0f}", spread(times))
        records.append({"name": name, **{key: value for key, value in first.items() if key != "answers"}, "ms": times})
    relative = ratios(costs["with"], costs["without"])
    text = f"checkpoints cost: TTFT times {spread(relative)} with one every 16 tokens; all answers are the same"
    memory = ", ".join(format_memory(mebibytes << 20) for mebibytes in options.memory_mib)
    print_result(
        "hybrid_prefix", vars(options), {"runs": records, "cost": relative}, [f"budgets: {memory}", table, text],
        as_json=options.json,
    )  # fmt: skip


if __name__ == "__main__":
    main()
