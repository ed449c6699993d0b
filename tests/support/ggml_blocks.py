"""Random rows of the formats of native kernels, for which there may be no quantization."""

from __future__ import annotations

from typing import Any, Final

import gguf
import numpy as np

from chairlift.kernels.weight_formats import FLOAT_GROUP, ZERO_POINTS
from chairlift.kernels.weights import ByteArray
from chairlift.loading.block_rows import BLOCK_LAYOUTS

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


def random_rows(name: str, rows: int, in_features: int, seed: int = 0) -> ByteArray:
    """Random rows for `PackedMatrix.pack_blocks`: uint8 [rows, bytes per row]."""
    rng = np.random.default_rng(seed)
    if name in ZERO_POINTS:
        layout = BLOCK_LAYOUTS[name]
        blocks: Any = rng.integers(0, 256, (rows, in_features // layout.inputs, layout.num_bytes), dtype=np.uint8)
        halves = rng.uniform(-1e-2, 1e-2, blocks.shape[:2]).astype(np.float16)
        blocks[..., :2] = halves[..., None].view(np.uint8)
        blocks[..., 2] &= (1 << layout.bits) - 1
        return blocks.reshape(rows, -1)
    if name == "f8_e4m3":
        numbers = rng.integers(0, 256, (rows, in_features), dtype=np.uint8)
        numbers[numbers & 127 == 127] = 0
        scales = rng.uniform(-1e-2, 1e-2, (rows, -(-in_features // FLOAT_GROUP))).astype(np.float32)
        return np.concatenate((numbers, scales.view(np.uint8)), axis=1)
    return random_blocks(gguf.GGMLQuantizationType[name.upper()], rows, in_features, seed)
