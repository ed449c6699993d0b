"""Compares Chairlift with transformers: `generate` on static batches, and its ContinuousBatchingManager.

    python -m benchmarks.peers.hf [--batching static,continuous] [--dtype bfloat16] [--seats 16] [--chairlift "..."]

Of a GGUF file, transformers gets the weights dequantized to float32. A static batch returns its answers when its
longest request has finished, so it has no TTFT and no ITL. Only requested tokens are counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from benchmarks.peers.compare import Peer, PeerContext, main
from benchmarks.peers.convert import EXPORT_REQUIREMENTS, hf_folder, window_perplexity
from benchmarks.peers.environment import environment, torch_requirement
from benchmarks.peers.report import Perplexity
from benchmarks.peers.stage import EngineSetting

from chairlift.errors import ConfigError

BATCHINGS: Final = {"static": 16, "continuous": 32}
"""The default number of seats of each batching mode, which is the fastest one."""
PAGE_SIZE: Final = 32
DTYPES: Final = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batching", default=",".join(BATCHINGS), help=f"of {', '.join(BATCHINGS)}")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="type in which transformers computes")
    parser.add_argument("--token-budget", type=int, default=512, help="max_batch_tokens of continuous batching")


def settings(context: PeerContext) -> list[EngineSetting]:
    python = environment(context.folder / "transformers", (*EXPORT_REQUIREMENTS, torch_requirement()))
    model = hf_folder(context, python)
    chosen = []
    for batching in context.arguments.batching.split(","):
        if batching not in BATCHINGS:
            given = context.arguments.batching
            raise ConfigError(f"batching={given}: {batching!r} must be one of {', '.join(BATCHINGS)}")
        seats = context.seats([BATCHINGS[batching]])
        chosen += [setting(context, python, model, batching, number) for number in seats]
    return chosen


def setting(context: PeerContext, python: Path, model: Path, batching: str, seats: int) -> EngineSetting:
    dtype = context.arguments.dtype
    options = {"model": str(model), "dtype": dtype, "batching": batching, "seats": seats}
    options |= {"num_threads": context.num_threads}
    if batching == "continuous":
        pages = seats * -(-context.workload.max_model_len // PAGE_SIZE)
        options |= {"token_budget": context.arguments.token_budget, "page_size": PAGE_SIZE, "num_blocks": pages}
    return EngineSetting(f"{batching}, {dtype}, {seats} seats", "hf_run", python, options)


def perplexity(context: PeerContext, setting: EngineSetting, text: Path) -> Perplexity:
    model, dtype = Path(setting.options["model"]), setting.options["dtype"]
    return window_perplexity(context, setting.python, "hf_perplexity", model, text, dtype)


if __name__ == "__main__":
    main(Peer("transformers", add_arguments, settings, perplexity), __doc__)
