"""The formats that native matrices have, which one a file's matrix gets, and how many bytes it takes.

| format | values | beside them |
|---|---|---|
| q4_0, q4_1, q8_0 | 4 or 8 bits, in groups of 32 inputs | a float16 scale a group; q4_1: a float16 minimum too |
| int8 | 8 bits | a float32 scale an output |
| bf16, f16, f32 | as they are | |
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

GROUPED: Final = ("q4_0", "q4_1", "q8_0")
FLOATS: Final = ("bf16", "f16", "f32")

NEAREST: Final = {"q4_k": "q4_1"}
"""Where blocks of ggml go that have no native form; all others go to q8_0, which has more bits than any of them."""

STRIPE: Final = 16
"""Outputs that are kept together; the last stripe is padded."""

GROUP: Final = 32
"""Inputs are padded to a multiple of it."""

ALIGNMENT: Final = 64
"""A stripe starts at a multiple of so many bytes."""

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
    """The format of a matrix that its file holds as `found` (see `PackedRows.format`)."""
    return found if found in BYTES_PER_INPUT else NEAREST.get(found, "q8_0")


def common_format(found: Collection[str]) -> str:
    """The one format for matrices that are multiplied as one: the smallest that holds each of them about as well as
    its own does."""
    formats = {native_format(name) for name in found}
    if len(formats) == 1:
        return formats.pop()
    floats = formats.intersection(FLOATS)
    if floats:
        return floats.pop() if len(floats) == 1 else "f32"
    return "q4_1" if formats == {"q4_0", "q4_1"} else "q8_0"


def stripes(name: str, out_features: int, in_features: int) -> tuple[int, int]:
    """A matrix in memory, as the number of its stripes and the bytes of one of them."""
    inputs = -(-in_features // GROUP) * GROUP
    scales = 4 * STRIPE if name == "int8" else 0
    stripe_bytes = int(STRIPE * inputs * BYTES_PER_INPUT[name]) + scales
    return -(-out_features // STRIPE), -(-stripe_bytes // ALIGNMENT) * ALIGNMENT


def matrix_bytes(name: str, out_features: int, in_features: int) -> int:
    """What a matrix takes in memory in the format `name`."""
    return math.prod(stripes(name, out_features, in_features))
