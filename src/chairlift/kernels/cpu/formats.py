"""The native format for each matrix of a file, and its size in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chairlift.kernels.weight_formats import BLOCKS, BYTES_PER_INPUT, FLOAT_GROUP, FLOATS, GROUP, ORDERED

STRIPE: Final = 16
"""The number of outputs whose values are interleaved in memory; the last stripe is padded."""

STRIPE_MULTIPLE: Final = 3
"""Block types have a multiple of this number of stripes, which AVX-512 kernels multiply at once."""

ALIGNMENT: Final = 64
"""The alignment of stripes, in bytes."""

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


def matrix_bytes(name: str, out_features: int, in_features: int) -> int:
    """The size of a matrix in memory in the format `name`, in bytes."""
    order = 4 * in_features if name.endswith(ORDERED) else 0
    name, inputs = name.removesuffix(ORDERED), -(-in_features // GROUP) * GROUP
    scales = {"int8": 1, "f8_e4m3": -(-inputs // FLOAT_GROUP)}.get(name, 0)
    stripe_bytes = int(STRIPE * inputs * BYTES_PER_INPUT[name]) + 4 * STRIPE * scales
    num_stripes = -(-out_features // STRIPE)
    if name in BLOCKS:
        num_stripes = -(-num_stripes // STRIPE_MULTIPLE) * STRIPE_MULTIPLE
    return num_stripes * -(-stripe_bytes // ALIGNMENT) * ALIGNMENT + order
