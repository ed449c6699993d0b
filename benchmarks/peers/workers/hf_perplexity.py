"""Measures the perplexity of safetensors with transformers, over windows of tokens.

python -m benchmarks.peers.workers.hf_perplexity WINDOWS.json MODEL OUT.json DTYPE
"""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

transformers: Any = import_module("transformers")


@torch.inference_mode()
def main() -> None:
    windows, model, out = (Path(argument) for argument in sys.argv[1:4])
    dtype = getattr(torch, sys.argv[4])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    values = []
    for window in json.loads(windows.read_text()):
        ids = torch.tensor(window)
        logits = loaded(ids[None]).logits[0, :-1].float()
        values.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none").double())
    out.write_text(json.dumps(math.exp(float(torch.cat(values).mean()))))


if __name__ == "__main__":
    main()
