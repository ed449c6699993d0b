"""The storage formats of native matrices, the choice of them for the matrices of a file, and their sizes in bytes.

| format | values | scales |
|---|---|---|
| int8 | 8 bits | a float32 scale per output |
| u4_g32, u4_g128, u8_g32 | 4 or 8 bits | a float16 scale and a zero point of 8 bits per 32 or 128 inputs |
| f8_e4m3 | floats of 8 bits | a float32 scale per 128 inputs |
| block types of ggml ("q4_1", "q6_k") | those of the file | those of the file |
| bf16, f16, f32 | floats of 16 or 32 bits | |

The suffix ORDERED means that the matrix has its own order of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

FLOATS: Final = ("bf16", "f16", "f32")

ORDERED: Final = "+order"
"""The suffix of formats whose inputs have another order than those of the layer. It takes 4 bytes per input."""

STRIPE: Final = 16
"""The number of outputs whose values are interleaved in memory; the last stripe is padded."""

STRIPE_MULTIPLE: Final = 3
"""Block types have a multiple of this number of stripes, which AVX-512 kernels multiply at once."""

GROUP: Final = 32
"""The number of inputs is padded to a multiple of this number."""

SUPER_BLOCK: Final = 256
"""The number of inputs in a block of the K formats and of IQ4_XS."""

FLOAT_GROUP: Final = 128
"""The number of inputs with one scale in f8_e4m3."""

ALIGNMENT: Final = 64
"""The alignment of stripes, in bytes."""

GROUPED: Final = {
    "q2_k": 2 / 8 + 1 / 16 + 4 / SUPER_BLOCK,
    "q3_k": 3 / 8 + 1 / 16 + 2 / SUPER_BLOCK,
    "q4_0": 4 / 8 + 2 / GROUP,
    "q4_1": 4 / 8 + 4 / GROUP,
    "q4_k": 4 / 8 + 2 / GROUP + 4 / SUPER_BLOCK,
    "q5_0": 5 / 8 + 2 / GROUP,
    "q5_1": 5 / 8 + 4 / GROUP,
    "q5_k": 5 / 8 + 2 / GROUP + 4 / SUPER_BLOCK,
    "q6_k": 6 / 8 + 1 / 16 + 2 / SUPER_BLOCK,
    "q8_0": 1 + 2 / GROUP,
    "iq4_nl": 4 / 8 + 2 / GROUP,
    "iq4_xs": 4 / 8 + 1 / GROUP + 2 / SUPER_BLOCK,
    "mxfp4": 4 / 8 + 1 / GROUP,
}
"""The block types of ggml that products read, with the bytes per input: values, scales and super-scales."""

ZERO_POINTS: Final = {"u4_g32": 4 / 8 + 3 / GROUP, "u4_g128": 4 / 8 + 3 / 128, "u8_g32": 1 + 3 / GROUP}
"""The block types with integer zero points, with the bytes per input."""

BLOCKS: Final = {**GROUPED, **ZERO_POINTS}
"""All block types, which can be multiplied as one layer."""

BYTES_PER_INPUT: Final = {**BLOCKS, "int8": 1.0, "f8_e4m3": 1.0, "bf16": 2.0, "f16": 2.0, "f32": 4.0}

EIGHT_BIT: Final = ("q8_0", "iq4_nl", "iq4_xs", "u8_g32", "int8")
"""The formats whose products multiply bytes of eight bits; those of the others are below 128."""

ROUNDED: Final = ("q4_0", "q4_1", "q8_0", "int8", *FLOATS)
"""The formats to which floats can be rounded."""


def native_format(found: str) -> str:
    """The native format for a matrix in the format `found` of its file (see `PackedRows.format`)."""
    return found if found.removesuffix(ORDERED) in BYTES_PER_INPUT else "q8_0"


def packed_parts(found: Sequence[tuple[str, int]], quantization: str | None = None) -> list[tuple[str, int]]:
    """The (format, out_features) of the native matrices for matrices of a file that are multiplied as one product.

    Block types remain separate matrices. Floats make all of them one matrix of floats, in float32 if some of the others
    have neither blocks nor the same format.

    Args:
        found: (format, out_features) of each matrix in the file.
        quantization: the format of all matrices, or None.
    """
    total = sum(out for _, out in found)
    if quantization is not None:
        return [(quantization, total)]
    formats = {native_format(name) for name, _ in found}
    floats = formats.intersection(FLOATS)
    unblocked = {name for name in formats if name.removesuffix(ORDERED) not in BLOCKS}
    if len(unblocked) == 1 and (floats or len(formats) == 1):
        return [(unblocked.pop(), total)]
    if unblocked:
        return [("f32", total)]
    parts: list[tuple[str, int]] = []
    for name, out in found:
        merged = parts.pop()[1] if parts and parts[-1][0] == native_format(name) else 0
        parts.append((native_format(name), merged + out))
    return parts


def stripes(name: str, out_features: int, in_features: int) -> tuple[int, int]:
    """The number of stripes of a matrix, and the bytes of one stripe."""
    name, inputs = name.removesuffix(ORDERED), -(-in_features // GROUP) * GROUP
    scales = {"int8": 1, "f8_e4m3": -(-inputs // FLOAT_GROUP)}.get(name, 0)
    stripe_bytes = int(STRIPE * inputs * BYTES_PER_INPUT[name]) + 4 * STRIPE * scales
    num_stripes = -(-out_features // STRIPE)
    if name in BLOCKS:
        num_stripes = -(-num_stripes // STRIPE_MULTIPLE) * STRIPE_MULTIPLE
    return num_stripes, -(-stripe_bytes // ALIGNMENT) * ALIGNMENT


def matrix_bytes(name: str, out_features: int, in_features: int) -> int:
    """The size of a matrix in memory in the format `name`, in bytes."""
    order = 4 * in_features if name.endswith(ORDERED) else 0
    return math.prod(stripes(name, out_features, in_features)) + order
