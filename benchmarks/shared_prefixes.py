"""Measures requests that share a cached prefix: its keys are computed once, or for each request.

    python -m benchmarks.shared_prefixes [--model PATH] [--quantization int8] [--prefixes 0,2048,7680]
                                         [--batch-sizes 8,32] [--own 64] [--steps 8] [--rounds 3]
                                         [--num-threads N] [--json]

All requests of a batch begin with the same tokens, which the prefix cache has, continue with `--own` new tokens, and
then decode together. Each round runs every batch in both ways on one engine, in alternating order. Measured are the
median time of a decode step and the longest TTFT.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

from benchmarks.common import print_result, ratios, run_interleaved, spread
from benchmarks.concurrency import WARM_UP_STEPS, decode_step_seconds, output_tokens
from rich.table import Table

from chairlift.config import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.errors import ConfigError
from chairlift.events import EventList
from chairlift.kernels.cpu import native
from chairlift.lab.bench.driver import drive
from chairlift.lab.metrics.run import summarize
from chairlift.lab.workload.request import WorkloadRequest

ARMS = {"each": False, "once": True}
"""How keys of the prefix are computed: for each request, or once for all of them."""


class SharedPrefixRun:
    """Runs batches of requests with a prefix on one engine.

    Raises:
        ConfigError: the requests are longer than the context of the model.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        seats = max(args.batch_sizes)
        config = EngineConfig(
            model=args.model,
            quantization=args.quantization,
            kernels="native",
            num_threads=args.num_threads,
            skip_tokenizer_init=True,
        )
        loaded = load_model(config)
        self._steps, self._outputs = args.steps, output_tokens(seats, args.steps)
        longest = max(args.prefixes) + args.own + self._outputs
        if longest > loaded.config.max_position_embeddings:
            limit = loaded.config.max_position_embeddings - args.own - self._outputs
            raise ConfigError(f"prefixes must be at most {limit} for this model, got {max(args.prefixes)}")
        own_blocks = -(-(args.own + self._outputs) // DEFAULT_BLOCK_SIZE) + 1
        num_blocks = -(-longest // DEFAULT_BLOCK_SIZE) + 2 * seats * own_blocks
        config = replace(
            loaded.engine_config,
            max_num_seqs=seats,
            max_num_batched_tokens=DEFAULT_MAX_NUM_BATCHED_TOKENS,
            block_size=DEFAULT_BLOCK_SIZE,
            num_kv_blocks=num_blocks,
            max_model_len=longest,
        )
        self._log = EventList()
        self._engine: Engine = build_engine(config, loaded=loaded, events=self._log)
        self._random, self._vocab_size = random.Random(0), loaded.config.vocab_size
        self._prefix, self._own, self._count = self._tokens(max(args.prefixes)), args.own, 0

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab_size) for _ in range(count)]

    def _requests(self, prefix: int, count: int, outputs: int) -> list[WorkloadRequest]:
        self._count += 1
        prompts = [self._prefix[:prefix] + self._tokens(self._own) for _ in range(count)]
        return [WorkloadRequest(f"{self._count}-{i}", 0.0, prompt, outputs) for i, prompt in enumerate(prompts)]

    def __call__(self, prefix: int, batch_size: int, *, shares: bool) -> dict[str, float]:
        """The median time of a decode step, and the time until the last first token, in milliseconds."""
        native.set_shares_keys(shares)
        drive(self._engine, self._requests(prefix, 1, 1))  # computes the prefix, if it is not cached
        del self._log.events[1:]
        drive(self._engine, self._requests(prefix, batch_size, self._outputs))
        seconds = decode_step_seconds(self._log, batch_size)[WARM_UP_STEPS:][: self._steps]
        ttft = summarize(self._log.events).ttft
        assert ttft is not None
        return {"step, ms": 1e3 * median(seconds), "last TTFT, ms": 1e3 * ttft.max}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One record for each prefix and batch size, with the values of each round."""
    run, records = SharedPrefixRun(args), []
    for prefix in args.prefixes:
        for batch_size in args.batch_sizes:
            arms = {name: partial(run, prefix, batch_size, shares=shares) for name, shares in ARMS.items()}
            results = run_interleaved(arms, args.rounds, num_warmups=0)
            records.append({"prefix": prefix, "requests": batch_size, **results})
    native.set_shares_keys(True)
    return records


def make_table(records: Sequence[dict[str, Any]]) -> Table:
    table = Table("prefix", "requests", "", "for each request", "once", "times faster")
    for record in records:
        for name in record["each"][0]:
            each, once = ([figures[name] for figures in record[arm]] for arm in ARMS)
            speedup = spread(ratios(each, once))
            table.add_row(str(record["prefix"]), str(record["requests"]), name, spread(each), spread(once), speedup)
    return table


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=".gguf file or folder; default: the default model")
    parser.add_argument("--quantization")
    parser.add_argument("--prefixes", type=numbers, default=[0, 2048, 7680], help="tokens that all requests share")
    parser.add_argument("--batch-sizes", type=numbers, default=[8, 32])
    parser.add_argument("--own", type=int, default=64, help="tokens of each prompt behind the prefix")
    parser.add_argument("--steps", type=int, default=8, help="measured decode steps of a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-threads", type=int, help="default: all cores")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args(arguments)
    records = measure(args)
    print_result("shared_prefixes", vars(args), records, [make_table(records)], as_json=args.json)


if __name__ == "__main__":
    main()
