"""Compares output tokens/s with and without speculative decoding on the same engine and the same prompts.

    python -m benchmarks.speculation [--model MODEL] [--workload copying] [--concurrency 1,2,4,16] [--rounds 5]
                                     [--speculative-config '{"method": "ngram"}'] [--quantization int8] [--json]

Workloads:

    copying   30 chat prompts whose answers repeat parts of the prompt: quotations from a text, edits of a program,
              repairs of JSON (benchmarks/data); greedy, at most --max-tokens tokens
    prose     passages of a story to be continued at temperature 1, so that little is repeated; exactly --max-tokens

In every round the workload runs once with and once without speculative decoding, in alternating order, with the same
number of concurrent requests and without a prefix cache. Both must return the same tokens. The result is the median of
the ratios of the rounds; its range is a confidence interval of 1 - 2^(1 - rounds) for the median (94 % for 5 rounds, 97
% for 6).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import Any, Final

from benchmarks.common import print_result
from benchmarks.copying_prompts import copying_prompts, passages
from rich.table import Table

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.engine.startup.loaded_model import load_model
from chairlift.events import EventList, Step

SEED: Final = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload.

    Attributes:
        tokens: output tokens by request, in the order of the prompts.
        num_drafts, num_accepted: draft tokens that were verified and accepted.
    """

    seconds: float
    tokens: list[list[int]]
    num_steps: int
    num_drafts: int
    num_accepted: int

    @property
    def speed(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def make_requests(engine: Engine, workload: str, num_requests: int, max_tokens: int) -> list[EngineRequest]:
    """The first requests of a workload, which is repeated if it has too few."""
    processor = engine.input_processor
    requests = []
    if workload == "copying":
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        messages = [[{"role": "user", "content": prompt.message}] for prompt in copying_prompts()]
        prompts = [processor.encode_chat(message, params)[1] for message in messages]
    else:
        params = SamplingParams(temperature=1, max_tokens=max_tokens, ignore_eos=True)
        prompts = [processor.encode(text, params)[1] for text in passages()]
    for index, token_ids in enumerate(islice(cycle(prompts), num_requests)):
        request_params = replace(params, seed=SEED + index)
        requests += processor.make(f"r{index}", token_ids, request_params, arrival_time=0.0)
    return requests


def run(engine: Engine, events: EventList, requests: Sequence[EngineRequest], concurrency: int) -> Run:
    """Run the requests to their end, at most `concurrency` at a time."""
    del events.events[:]
    core = engine.core
    waiting = list(reversed(requests))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    num_unfinished = 0
    started = time.perf_counter()
    while waiting or num_unfinished:
        while waiting and num_unfinished < concurrency:
            core.add(waiting.pop().to_request())
            num_unfinished += 1
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
            num_unfinished -= output.finish_reason is not None
    seconds = time.perf_counter() - started
    steps = [event for event in events.events if isinstance(event, Step)]
    num_drafts = sum(sum(step.num_draft) for step in steps)
    return Run(seconds, list(tokens.values()), len(steps), num_drafts, sum(step.num_accepted for step in steps))


@dataclass(frozen=True, slots=True)
class Comparison:
    """The runs of all rounds with one number of concurrent requests."""

    concurrency: int
    plain: list[Run]
    speculative: list[Run]

    @property
    def ratios(self) -> list[float]:
        return [ours.speed / theirs.speed for ours, theirs in zip(self.speculative, self.plain, strict=True)]

    def row(self) -> list[str]:
        last, ratios = self.speculative[-1], self.ratios
        plain, speculative = (median(run.speed for run in runs) for runs in (self.plain, self.speculative))
        accepted = f"{last.num_accepted / last.num_drafts:.0%}" if last.num_drafts else "-"
        return [
            str(self.concurrency),
            f"{plain:.1f}",
            f"{speculative:.1f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{last.num_drafts:,}",
            accepted,
        ]

    def to_dict(self) -> dict[str, Any]:
        def figures(run: Run) -> dict[str, Any]:
            values = {name: value for name, value in asdict(run).items() if name != "tokens"}
            return {**values, "tokens_per_s": run.speed}

        return {
            "concurrency": self.concurrency,
            "ratio": median(self.ratios),
            "ratios": self.ratios,
            "plain": [figures(run) for run in self.plain],
            "speculative": [figures(run) for run in self.speculative],
        }


def compare(options: argparse.Namespace) -> list[Comparison]:
    config = EngineConfig(
        model=options.model,
        quantization=options.quantization,
        enable_prefix_caching=False,
        max_model_len=options.max_model_len,
        max_num_seqs=max(64, *options.concurrency),
        num_threads=options.num_threads,
    )
    loaded = load_model(config)
    logs = EventList(), EventList()
    configs = config, replace(config, speculative_config=options.speculative_config)
    engines = [build_engine(c, loaded=loaded, events=log) for c, log in zip(configs, logs, strict=True)]
    found = []
    for concurrency in options.concurrency:
        num_requests = max(options.num_prompts, concurrency)
        requests = [make_requests(engine, options.workload, num_requests, options.max_tokens) for engine in engines]
        for engine, log, prepared in zip(engines, logs, requests, strict=True):
            run(engine, log, prepared[: min(2, concurrency)], concurrency)
        runs: tuple[list[Run], list[Run]] = [], []
        for number in range(options.rounds):
            for index in (0, 1) if number % 2 == 0 else (1, 0):
                runs[index].append(run(engines[index], logs[index], requests[index], concurrency))
            assert runs[0][-1].tokens == runs[1][-1].tokens, "speculative decoding changed the output"
            ratio = runs[1][-1].speed / runs[0][-1].speed
            print(f"{concurrency} requests, round {number + 1}: {ratio:.3f}", file=sys.stderr)
        found.append(Comparison(concurrency, *runs))
    return found


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--workload", choices=["copying", "prose"], default="copying")
    parser.add_argument("--concurrency", type=_integers, default=[1, 2, 4, 16])
    parser.add_argument("--num-prompts", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--speculative-config", type=json.loads, default={"method": "ngram"})
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    results = compare(options)
    table = Table(title=f"Speculative decoding: {options.workload}, {options.model or 'default model'}")
    for name in ("requests", "tokens/s without", "tokens/s with", "ratio", "draft tokens", "accepted"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*result.row())
    records = [result.to_dict() for result in results]
    print_result("speculation", vars(options), records, [table], as_json=options.json)


if __name__ == "__main__":
    main()
