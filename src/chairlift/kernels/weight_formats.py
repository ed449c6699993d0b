"""The formats of weights in files and in memory.

| format | values | scales |
|---|---|---|
| int8 | 8 bits | a float32 scale per output |
| u4_g32, u4_g128, u8_g32 | 4 or 8 bits | a float16 scale and a zero point of 8 bits per 32 or 128 inputs |
| f8_e4m3 | floats of 8 bits | a float32 scale per 128 inputs |
| block types of ggml ("q4_1", "q6_k") | as in the file | as in the file |
| bf16, f16, f32 | floats of 16 or 32 bits | |

The suffix ORDERED means that the matrix has its own order of inputs.
"""

from __future__ import annotations

from typing import Final

FLOATS: Final = ("bf16", "f16", "f32")

ORDERED: Final = "+order"
"""The suffix of formats whose inputs have another order than in the layer. It takes 4 bytes per input."""

GROUP: Final = 32
"""The number of inputs of the smallest groups with a scale; matrices are padded to a multiple of it."""

SUPER_BLOCK: Final = 256
"""The number of inputs in a block of the K formats and of IQ4_XS."""

FLOAT_GROUP: Final = 128
"""The number of inputs with one scale in f8_e4m3."""

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
