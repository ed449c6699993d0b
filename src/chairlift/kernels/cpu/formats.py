"""The storage formats of native matrices, the choice of one for a matrix of a file, and its size in bytes.

| format | values | scales |
|---|---|---|
| q4_0, q4_1, q8_0 | 4 or 8 bits, in groups of 32 inputs | a float16 scale per group, and for q4_1 a float16 minimum |
| int8 | 8 bits | a float32 scale per output |
| bf16, f16, f32 | floats of 16 or 32 bits | |
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

FLOATS: Final = ("bf16", "f16", "f32")

NEAREST: Final = {"q4_k": "q4_1"}
"""The native formats for block types of ggml without a native form. All others become q8_0, which has more bits."""

STRIPE: Final = 16
"""The number of outputs whose values are interleaved in memory; the last stripe is padded."""

GROUP: Final = 32
"""The number of inputs is padded to a multiple of this number."""

ALIGNMENT: Final = 64
"""The alignment of stripes, in bytes."""

BYTES_PER_INPUT: Final = {
    "q4_0": 0.5 + 2 / GROUP,
    "q4_1": 0.5 + 4 / GROUP,
    "q8_0": 1 + 2 / GROUP,
    "int8": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
}


def native_format(found: str) -> str:
    """The native format for a matrix in the format `found` of its file (see `PackedRows.format`)."""
    return found if found in BYTES_PER_INPUT else NEAREST.get(found, "q8_0")


def common_format(found: Collection[str]) -> str:
    """The format for matrices that are multiplied as one.

    It is the smallest format that represents each of them about as exactly as its own format.
    """
    formats = {native_format(name) for name in found}
    if len(formats) == 1:
        return formats.pop()
    floats = formats.intersection(FLOATS)
    if floats:
        return floats.pop() if len(floats) == 1 else "f32"
    return "q4_1" if formats == {"q4_0", "q4_1"} else "q8_0"


def stripes(name: str, out_features: int, in_features: int) -> tuple[int, int]:
    """The number of stripes of a matrix, and the bytes of one stripe."""
    inputs = -(-in_features // GROUP) * GROUP
    scales = 4 * STRIPE if name == "int8" else 0
    stripe_bytes = int(STRIPE * inputs * BYTES_PER_INPUT[name]) + scales
    return -(-out_features // STRIPE), -(-stripe_bytes // ALIGNMENT) * ALIGNMENT


def matrix_bytes(name: str, out_features: int, in_features: int) -> int:
    """The size of a matrix in memory in the format `name`, in bytes."""
    return math.prod(stripes(name, out_features, in_features))
