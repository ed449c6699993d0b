"""Measures everything that the first session on a GPU should show, or tries all of it in small on the CPU.

    python -m benchmarks.gpu [--model FOLDER] [--kernels triton,torch] [--sections kernels,engine,batching,memory]
                             [--rounds 5] [--pictures FOLDER] [--json FILE]
    python -m benchmarks.gpu --interpret

Without a model it is Llama 3 8B with random weights in bfloat16. The sections:

    kernels    each kernel: its deviation from the definition of the tests, its time, its share of the measured ceiling
    engine     prompts, a burst and single streams with each kernel set, and with vLLM if it is installed
    batching   static batches and continuous batching on the same requests, beside the published factor of 23, and
               with --pictures the seats and the KV memory of these runs
    memory     the planned memory beside what was allocated

A section that fails does not end the others; the command then ends with 1. With --interpret, Triton's interpreter runs
the kernels of a tiny model on the CPU: results are checked, and times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

SECTIONS: Final = ("kernels", "engine", "batching", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file; default: Llama 3 8B with random weights")
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=["triton", "torch"])
    parser.add_argument("--sections", type=lambda text: text.split(","), default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kernel")
    parser.add_argument("--interpret", action="store_true", help="run all in small on the CPU, interpreted")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the runs of batching; needs matplotlib")
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    if unknown := [name for name in args.sections if name not in SECTIONS]:
        parser.error(f"--sections: {unknown[0]!r} must be one of {', '.join(SECTIONS)}")
    if args.interpret and args.model is not None:
        parser.error("--interpret runs a tiny model: leave --model out")
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a module of kernels is imported.
    sys.path.append(str(Path(__file__).parents[2] / "tests"))  # for the definitions of kernels
    from benchmarks.gpu.session import run_session

    from chairlift.errors import ChairliftError

    try:
        return run_session(args)
    except ChairliftError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
