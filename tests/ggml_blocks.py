"""Random blocks of ggml, in formats for which the package `gguf` has no quantization too."""

from __future__ import annotations

from typing import Final

import gguf
import numpy as np

from chairlift.kernels.weights import ByteArray

HALVES: Final = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_XS": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "MXFP4": (),
}
"""The offsets of the float16 numbers in a block; other types have one at offset 0."""


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, in_features: int, seed: int = 0) -> ByteArray:
    """Random bytes with scales of normal size: uint8 [rows, bytes per row]."""
    rng = np.random.default_rng(seed)
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, in_features // size, num_bytes), dtype=np.uint8)
    for offset in HALVES.get(kind.name, (0,)):
        halves = rng.uniform(-1e-2, 1e-2, blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    if kind == gguf.GGMLQuantizationType.MXFP4:
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(rows, -1)
