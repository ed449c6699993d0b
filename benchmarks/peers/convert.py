"""Converts a GGUF file to a folder that peers read, and measures perplexities."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Final

from benchmarks.peers.compare import PeerContext
from benchmarks.peers.environment import run
from benchmarks.peers.report import Perplexity
from benchmarks.peers.stage import ROOT

from chairlift.lab.bench.bench_options import PerplexityOptions
from chairlift.lab.bench.perplexity import read_text, split_windows

EXPORT_REQUIREMENTS: Final = ("transformers", "gguf", "accelerate", "sentencepiece")
"""Requirements for converting from and to GGUF files, in addition to torch."""


def hf_folder(context: PeerContext, python: Path) -> Path:
    """The folder of the model, or a folder with the weights of its GGUF file in float32, which is created once."""
    if not context.is_gguf:
        return context.model.path
    target = context.models / f"{context.model_name}-float32"
    if not (target / "tokenizer_config.json").exists():
        run_tool(python, "export_hf", context.model.path, target)
    return target


def run_tool(python: Path, tool: str, *arguments: Path | str) -> None:
    """Run a module of `benchmarks.peers.workers` in the environment of a peer.

    Raises:
        SetupError: the module failed.
    """
    run([python, "-m", f"benchmarks.peers.workers.{tool}", *arguments], ROOT)


def window_perplexity(
    context: PeerContext, python: Path, tool: str, model: Path, text: Path, *arguments: str
) -> Perplexity:
    """Measure the perplexity as `chairlift bench perplexity` does, with the logits of the peer.

    Args:
        tool: module of `benchmarks.peers.workers` whose arguments are the windows, the model, the output file and
            `arguments`.

    Raises:
        ConfigError: the text cannot be read.
        SetupError: the tool failed.
    """
    options = PerplexityOptions(text=text)
    windows = split_windows(context.model.tokenizer(), read_text(text), options)
    with tempfile.TemporaryDirectory() as temporary:
        given, out = Path(temporary) / "windows.json", Path(temporary) / "perplexity.json"
        given.write_text(json.dumps(windows), encoding="utf-8")
        run_tool(python, tool, given, model, out, *arguments)
        value = float(json.loads(out.read_text(encoding="utf-8")))
    return Perplexity(value, f"windows of {options.window} tokens, all but the first of each scored")
