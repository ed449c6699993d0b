"""The model in the forms that peers read, made from the one GGUF file that Chairlift reads."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.peers.compare import Context
from benchmarks.peers.environment import run
from benchmarks.peers.report import Perplexity
from benchmarks.peers.stage import ROOT

from chairlift.lab.bench.perplexity import PerplexityOptions, read_text, split_windows
from chairlift.loading.resolve import load_tokenizer, resolve_model

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


def window_perplexity(context: Context, python: Path, tool: str, model: Path, text: Path) -> Perplexity:
    """As `chairlift bench perplexity` defines it, of the peer's own logits.

    Args:
        tool: module of `benchmarks.peers.workers` that takes windows, model and where the result goes.

    Raises:
        ConfigError: the text cannot be read.
        SetupError: the tool failed.
    """
    options = PerplexityOptions(text=text)
    windows = split_windows(load_tokenizer(resolve_model(str(context.gguf))), read_text(text), options)
    with tempfile.TemporaryDirectory() as temporary:
        given, out = Path(temporary) / "windows.json", Path(temporary) / "perplexity.json"
        given.write_text(json.dumps(windows), encoding="utf-8")
        run_tool(python, tool, given, model, out)
        value = float(json.loads(out.read_text(encoding="utf-8")))
    return Perplexity(value, f"windows of {options.window} tokens, all but the first of each scored")
