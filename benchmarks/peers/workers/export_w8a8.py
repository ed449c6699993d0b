"""Quantizes safetensors to W8A8: linear layers to int8 by output channel, activations to int8 by token.

    python -m benchmarks.peers.workers.export_w8a8 FOLDER TARGET

Values are rounded to nearest, symmetrically. Embedding and LM head are not quantized. The format is int-quantized of
compressed-tensors.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

safetensors: Any = import_module("safetensors.torch")

LINEAR = re.compile(r"(_proj(_qkv|_z|_b|_a)?|\.w[123])\.weight$")
SCHEME = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**SCHEME, "strategy": "channel", "dynamic": False},
            "input_activations": {**SCHEME, "strategy": "token", "dynamic": True},
        }
    },
}


def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize the weight [N, K] of a linear layer to int8 [N, K] and float32 scales [N, 1]; keep other tensors."""
    if LINEAR.search(name) is None:
        return {name: tensor}
    tensor = tensor.float()
    scale = tensor.abs().amax(dim=1, keepdim=True) / 127
    weight = (tensor / scale).round().clamp(-127, 127).to(torch.int8)
    return {name: weight, f"{name}_scale": scale}


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    target.mkdir(parents=True, exist_ok=True)
    for extra in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (source / extra).exists():
            shutil.copyfile(source / extra, target / extra)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in safetensors.load_file(shard).items():
            tensors |= quantize(name, tensor)
    safetensors.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = QUANTIZATION
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
