"""Measures the perplexity of an OpenVINO IR or of a GGUF file with OpenVINO GenAI, over windows of tokens.

python -m benchmarks.peers.workers.openvino_perplexity WINDOWS.json MODEL OUT.json
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

openvino: Any = import_module("openvino")
openvino_genai: Any = import_module("openvino_genai")


def read_as_ir(gguf: Path, folder: Path) -> Path:
    """Convert a GGUF file to an IR. OpenVINO GenAI writes the IR beside the file: here, beside a link to it."""
    link = folder / gguf.name
    link.symlink_to(gguf)
    openvino_genai.ContinuousBatchingPipeline(
        str(link), openvino_genai.SchedulerConfig(), "CPU", {"enable_save_ov_model": True}
    )
    return folder / "openvino_model.xml"


def negative_log_likelihoods(request: Any, window: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Compute [N - 1] negative log-likelihoods in nats for N tokens: of each token after all tokens before it."""
    request.reset_state()
    ids = np.array([window], dtype=np.int64)
    positions = np.arange(len(window), dtype=np.int64)[None]
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": positions}
    logits = request.infer({**inputs, "beam_idx": np.zeros(1, dtype=np.int32)})["logits"][0, :-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    chosen = np.take_along_axis(logits, ids[0, 1:, None], axis=1)[:, 0]
    likelihoods: np.ndarray[Any, np.dtype[np.float64]] = np.log(np.exp(logits).sum(axis=1)) - chosen
    return likelihoods


def main() -> None:
    windows, model, out = (Path(argument) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        ir = read_as_ir(model, Path(temporary)) if model.suffix == ".gguf" else model / "openvino_model.xml"
        request = openvino.Core().compile_model(ir, "CPU").create_infer_request()
        values = [negative_log_likelihoods(request, window) for window in json.loads(windows.read_text())]
    out.write_text(json.dumps(math.exp(np.concatenate(values).mean())))


if __name__ == "__main__":
    main()
