"""The model in the forms that peers read, made from the one GGUF file that Chairlift reads."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.peers.compare import Context
from benchmarks.peers.environment import run
from benchmarks.peers.stage import ROOT

EXPORT_REQUIREMENTS: Final = ("transformers", "gguf", "accelerate")
"""What reading a GGUF with transformers takes, besides torch."""


def hf_folder(context: Context, python: Path) -> Path:
    """The GGUF's weights dequantized to float32 in a folder as transformers writes it; made once."""
    target = context.folder / "models" / f"{context.gguf.stem}-float32"
    if not (target / "tokenizer_config.json").exists():
        run_tool(python, "export_hf", context.gguf, target)
    return target


def run_tool(python: Path, tool: str, *arguments: Path | str) -> None:
    """A module of `benchmarks.peers.workers` in a peer's environment.

    Raises:
        SetupError: it failed.
    """
    run([python, "-m", f"benchmarks.peers.workers.{tool}", *arguments], ROOT)
