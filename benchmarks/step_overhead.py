"""Measures the overhead of a decode step: the microseconds of a step whose model computes nothing.

    python benchmarks/step_overhead.py [--batch-sizes 1,8,64] [--vocab-size 49152] [--steps 300] [--random]
                                       [--no-native] [--num-threads N]

The engine core, the runner and the sampler are those of an engine. The model always returns the same logits, and its
attention has no plan. The script prints medians over steps and one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import median
from time import perf_counter
from typing import Any

import torch

from chairlift.clock import MonotonicClock
from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.scheduler import Scheduler
from chairlift.kernels.sampling import SamplingKernels
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.worker.model_runner import ModelRunner

BLOCK_SIZE = 16
PROMPT = 100
WARM_UP_STEPS = 20
PARTS = ("schedule", "submit", "result", "update", "step")


class NullModel:
    """A model that always returns the same hidden states and logits."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._hidden = torch.zeros(max_num_seqs * PROMPT, 1)
        self._logits = torch.randn(max_num_seqs, vocab_size, generator=torch.Generator().manual_seed(0)) * 4

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        return self._hidden[: len(token_ids)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]


def sampling_kernels(native: bool) -> SamplingKernels | None:
    if not native:
        return None
    from chairlift.kernels.cpu.sampling import NativeSampling

    return NativeSampling()


def make_decoding_core(batch_size: int, args: argparse.Namespace) -> EngineCore:
    """Create an engine core in which all requests decode."""
    num_tokens = PROMPT + WARM_UP_STEPS + args.steps + 2
    config = SchedulerConfig(num_tokens, max_num_seqs=batch_size, max_num_batched_tokens=batch_size * PROMPT)
    runner = ModelRunner(
        NullModel(batch_size, args.vocab_size),
        lambda metadata: None,
        vocab_size=args.vocab_size,
        max_num_seqs=batch_size,
        max_model_len=num_tokens,
        block_size=BLOCK_SIZE,
        sampling=sampling_kernels(args.native),
    )
    manager = PagedKVCacheManager(batch_size * (num_tokens // BLOCK_SIZE + 1), BLOCK_SIZE)
    core = EngineCore(Scheduler(config, manager), runner, MonotonicClock())
    sampling = {"temperature": 0.8, "top_p": 0.95, "top_k": 50} if args.random else {"temperature": 0}
    for index in range(batch_size):
        params = SamplingParams(**sampling, max_tokens=num_tokens - PROMPT, ignore_eos=True, seed=index)
        prompt = [(index + i) % 97 for i in range(PROMPT + index % BLOCK_SIZE - BLOCK_SIZE)]
        core.add(Request(f"request-{index}", prompt, params, num_tokens - PROMPT, seed=index))
    for _ in range(WARM_UP_STEPS):
        core.step()
    return core


def time_method(durations: dict[str, list[float]], name: str, owner: Any, method: str) -> None:
    function = getattr(owner, method)

    def call(*args: Any) -> Any:
        start = perf_counter()
        try:
            return function(*args)
        finally:
            durations[name].append(perf_counter() - start)

    setattr(owner, method, call)


def microseconds(batch_size: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure the median microseconds of each part of a step."""
    core = make_decoding_core(batch_size, args)
    durations: dict[str, list[float]] = defaultdict(list)
    for name, owner in (("schedule", core.scheduler), ("update", core.scheduler)):
        time_method(durations, name, owner, name)
    for name in ("submit", "result"):
        time_method(durations, name, core._executor, name)
    time_method(durations, "step", core, "step")
    for _ in range(args.steps):
        assert len(core.step()) == batch_size, "every request decodes in every measured step"
    return {name: round(1e6 * median(durations[name]), 1) for name in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", default="1,8,64")
    parser.add_argument("--vocab-size", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--random", action="store_true", help="temperature, top_k and top_p instead of greedy")
    parser.add_argument("--no-native", dest="native", action="store_false", help="sample with torch")
    parser.add_argument("--num-threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(1 if args.native else args.num_threads)
    if args.native:
        from chairlift.kernels.cpu import load

        load().set_num_threads(args.num_threads)
    rows = {size: microseconds(size, args) for size in map(int, args.batch_sizes.split(","))}
    print(f"{'microseconds':>12} " + " ".join(f"{part:>9}" for part in PARTS))
    for size, row in rows.items():
        print(f"{'batch ' + str(size):>12} " + " ".join(f"{row[part]:9.1f}" for part in PARTS))
    settings = {name: getattr(args, name) for name in ("vocab_size", "steps", "random", "native", "num_threads")}
    print(json.dumps({"benchmark": "step_overhead", **settings, "microseconds": rows}))


if __name__ == "__main__":
    main()
