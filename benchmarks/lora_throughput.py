"""Compares output tokens/s of requests mixed over LoRA adapters with requests without adapters and with merged models.

    python -m benchmarks.lora_throughput [--model MODEL] [--adapters 8] [--rank 8] [--requests 64] [--rounds 5]
                                         [--input-len 32] [--max-tokens 64] [--quantization int8] [--json]

Arms:

    no adapter      all requests at once, in an engine without memory for adapters
    unused          the same in the engine that has loaded the adapters
    mixed           all requests at once; request i uses adapter i modulo the number of adapters
    merged in turn  one model after the other, each with the requests of its adapter. A merged model has the shapes of
                    the base model, which takes its place, because the time of a step does not depend on the weights

The adapters have random weights in all projections of the layers. The prompts are random tokens, and the outputs have a
fixed length, so all arms compute the same number of tokens. In every round each arm runs once, in rotating order. The
ratio of an arm is the median over the rounds of its speed divided by that of "no adapter" in the same round.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import torch
from benchmarks.common import print_result, ratios, run_interleaved, spread
from rich.table import Table
from safetensors.torch import save_file

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.loading.resolve import resolve_model
from chairlift.models.declaration.model_config import ModelConfig

SEED: Final = 0
WEIGHT_SIZE: Final = 0.01
BASE: Final = "no adapter"


def write_adapter(folder: Path, config: ModelConfig, rank: int, seed: int) -> str:
    """Write an adapter with random weights as the PEFT library does."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in config.layers:
        for matrix in layer.adaptable:
            for name, out in matrix.parts:
                for kind, shape in (("A", (rank, matrix.in_features)), ("B", (out, rank))):
                    tensors[f"base_model.model.{name}.lora_{kind}.weight"] = WEIGHT_SIZE * torch.randn(
                        shape, generator=draw
                    )
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return str(folder)


def make_requests(engine: Engine, options: argparse.Namespace, lora_ids: Sequence[int]) -> list[EngineRequest]:
    """One request for each adapter id, with a prompt of its own."""
    draw = random.Random(SEED)
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)
    size = engine.facts.model_config.vocab_size
    requests = []
    for index, lora_id in enumerate(lora_ids):
        prompt = [draw.randrange(size) for _ in range(options.input_len)]
        requests += engine.input_processor.make(f"r{index}", prompt, params, arrival_time=0.0, lora_id=lora_id)
    return requests


def run(engine: Engine, requests: Sequence[EngineRequest]) -> float:
    """Run the requests at once; returns the seconds."""
    started = time.perf_counter()
    for request in requests:
        engine.core.add(request.to_request())
    num_unfinished = len(requests)
    while num_unfinished:
        num_unfinished -= sum(output.finish_reason is not None for output in engine.core.step())
    return time.perf_counter() - started


def make_arms(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float]]:
    """Build the engines, and return for each arm the function that runs it."""
    config = resolve_model(options.model).config()
    paths = [write_adapter(folder / str(index), config, options.rank, index) for index in range(options.adapters)]
    common = {
        "model": options.model,
        "quantization": options.quantization,
        "num_threads": options.num_threads,
        "enable_prefix_caching": False,
        "max_model_len": options.input_len + options.max_tokens,
        "max_num_seqs": options.requests,
    }
    plain = build_engine(EngineConfig(**common))
    modules = {f"adapter-{index}": path for index, path in enumerate(paths)}
    adapted = build_engine(EngineConfig(**common, lora_modules=modules, max_lora_rank=options.rank))
    ids = [1 + index % options.adapters for index in range(options.requests)]

    def in_turn() -> float:
        return sum(run(plain, make_requests(plain, options, [0] * ids.count(lora_id))) for lora_id in sorted(set(ids)))

    return {
        BASE: lambda: run(plain, make_requests(plain, options, [0] * len(ids))),
        "unused": lambda: run(adapted, make_requests(adapted, options, [0] * len(ids))),
        "mixed": lambda: run(adapted, make_requests(adapted, options, ids)),
        "merged in turn": in_turn,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--quantization")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = run_interleaved(make_arms(options, Path(folder)), options.rounds)
    num_tokens = options.requests * options.max_tokens
    speedups = {name: ratios(seconds[BASE], found) for name, found in seconds.items()}
    results = {name: {"seconds": seconds[name], "ratio": median(speedups[name])} for name in seconds}
    table = Table("requests", "output tokens/s", f"ratio to {BASE}")
    for name, found in seconds.items():
        table.add_row(name, f"{num_tokens / median(found):.1f}", spread(speedups[name]))
    print_result("lora_throughput", vars(options), results, [table], as_json=options.json)


if __name__ == "__main__":
    main()
