"""The attention of typical models, for which `python -m benchmarks.gpu_compile` compiles the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from chairlift.kernels.attention import AttentionShape

_CUDA: Final = torch.device("cuda")
_SHAPES: Final = {
    "llama-3-8b": AttentionShape(32, 8, 128, 128**-0.5, torch.bfloat16, _CUDA),
    "llama-3-8b in float16": AttentionShape(32, 8, 128, 128**-0.5, torch.float16, _CUDA),
    "gpt-oss-20b": AttentionShape(64, 8, 64, 64**-0.5, torch.bfloat16, _CUDA),
    "gemma-2-9b": AttentionShape(16, 8, 256, 256**-0.5, torch.bfloat16, _CUDA, logits_soft_cap=50.0),
    "deepseek-v3": AttentionShape(128, 1, 576, 192**-0.5, torch.bfloat16, _CUDA, keys_are_values=True),
}

TYPICAL_SHAPES: Final = {
    f"{model}, K and V in {str(kept).removeprefix('torch.')}": replace(shape, kv_cache_dtype=kept)
    for model, shape in _SHAPES.items()
    for kept in (shape.dtype, torch.int8)
}
