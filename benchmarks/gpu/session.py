"""Runs the sections of a session, prints their tables, and writes the results of all to one file."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console, RenderableType

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.kernels.kernel_set import KERNEL_SETS
from chairlift.lab.bench.machine import machine_caption, machine_facts

LLAMA_3_8B: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The config.json of Llama 3 8B."""

TINY: Final = LLAMA_3_8B | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The model of --interpret."""


@dataclass(frozen=True, slots=True)
class Session:
    """What all sections share.

    Attributes:
        model: a folder or file.
        is_random: whether the model has random weights.
        is_small: whether the interpreter runs everything in small on the CPU.
        kernels: the kernel sets; the first one is that of the sections `batching` and `memory`.
        rounds: the number of measurements of a kernel.
        pictures: the folder for event logs and pictures of the section `batching`, or None.
    """

    model: str
    is_random: bool
    is_small: bool
    kernels: Sequence[str]
    rounds: int
    pictures: Path | None = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_small else "cuda")

    def engine_flags(self, kernels: str) -> list[str]:
        """The options of an engine with these kernels."""
        seats, budget, length = (4, 24, 32) if self.is_small else (64, 2048, 4096)
        limits = ["--max-num-seqs", str(seats), "--max-num-batched-tokens", str(budget), "--max-model-len", str(length)]
        flags = ["--model", self.model, "--device", self.device.type, "--dtype", "bfloat16", "--kernels", kernels]
        random = ["--load-format", "dummy", "--skip-tokenizer-init"] if self.is_random else []
        return [*flags, *limits, *random, *(["--num-kv-blocks", "16"] if self.is_small else [])]

    def engine_config(self, kernels: str) -> EngineConfig:
        from benchmarks.peers.engine_options import parse_engine_options

        return parse_engine_options(self.engine_flags(kernels))


Section = Callable[[Session], tuple[Any, list[RenderableType]]]
"""Returns the results for JSON, and what is printed."""


def find_section(name: str) -> Section:
    """A section by name, which is imported when it is needed."""
    from benchmarks.gpu import engine_runs, kernel_report

    sections: dict[str, Section] = {
        "kernels": kernel_report.measure_kernels,
        "engine": engine_runs.measure_engines,
        "batching": engine_runs.compare_batching,
        "memory": engine_runs.compare_memory,
    }
    return sections[name]


def gpu_facts() -> dict[str, str]:
    """The GPU with its driver, and the versions of packages."""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    for package in ("triton", "vllm"):
        with suppress(PackageNotFoundError):
            facts[package] = version(package)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        facts |= {
            "device": found.name,
            "capability": f"sm_{found.major}{found.minor}",
            "memory": f"{found.total_memory:,} bytes",
            "multiprocessors": str(found.multi_processor_count),
        }
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem,power.limit", "--format=csv"]
        facts["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def run_session(args: argparse.Namespace) -> int:
    """Run the sections; 1 if one of them fails or finds a deviation."""
    console = Console(width=140)
    if not args.interpret and not torch.cuda.is_available():
        console.print(
            f"error: torch {torch.__version__} finds no CUDA device; --interpret runs all in small on the CPU"
        )
        return 1
    if unknown := [name for name in args.kernels if name not in KERNEL_SETS]:
        raise ConfigError(f"kernels: {unknown[0]!r} must be one of {', '.join(KERNEL_SETS)}")
    machine, facts = machine_facts(), gpu_facts()
    console.print(machine_caption(machine, None))
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if args.interpret:
        console.print("Interpreted on the CPU, with a tiny model: the times mean nothing.", style="bold")
    record: dict[str, Any] = {"machine": asdict(machine), "gpu": facts, "interpreted": args.interpret, "sections": {}}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            text = json.dumps(TINY if args.interpret else LLAMA_3_8B)
            Path(folder, "config.json").write_text(text, encoding="utf-8")
        rounds = 1 if args.interpret else args.rounds
        model, is_random = args.model or folder, args.model is None
        session = Session(model, is_random, args.interpret, args.kernels, rounds, args.pictures)
        for name in args.sections:
            start = time.perf_counter()
            try:
                found, parts = find_section(name)(session)
            except Exception:  # The other sections are worth their time on a device that is rented by the hour.
                traceback.print_exc()
                failed.append(f"{name} failed")
                continue
            record["sections"][name] = found
            for part in parts:
                console.print(part)
            failed += [f"{name}: {problem}" for problem in found.get("problems", ())]
            console.print(f"{name}: {time.perf_counter() - start:.0f} s", style="dim")
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1, default=str) + "\n", encoding="utf-8")
    for problem in failed:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if failed else 0
