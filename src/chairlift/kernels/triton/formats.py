"""The formats of matrices on the device, and their size; importing this module needs neither torch nor Triton.

Outputs are in tiles of TILE, inputs in steps of STEP; both are padded with zeros. All arrays are [tiles, steps, TILE,
...], so that what a program reads in a step is contiguous. Inputs are in order, the first in the low bits of a byte.

| format | values of a step | scale of each group | of 256 inputs |
|---|---|---|---|
| u4_g32, u4_g128 | 64 bytes | float16, and the zero point in float16 | |
| u8_g32 | 128 bytes | float16, and the zero point in float16 | |
| q4_0 | 64 bytes | float16 | |
| q4_1 | 64 bytes | float16, and minus the minimum in float16 | |
| q8_0 | 128 signed bytes | float16 | |
| int8 | 128 signed bytes | float32, one per output | |
| f8_e4m3 | 128 bytes | float32 | |
| mxfp4 | 64 bytes | the exponent in a byte | |
| q4_k | 64 bytes | two bytes: factors of scale and minimum | scale and minimum in float16 |
| q6_k | 64 bytes, and 32 with the two high bits | a signed byte, the factor of the scale | float16 |

A product decodes a weight in float32, with at most one rounding, and rounds it to the type of activations. So a weight
has the value that it has in the set "torch", in all formats. Activations are never quantized, also not with int8: the
products of few rows wait for memory, and the files do not say whether their activations are meant to be quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.kernels.weight_formats import FLOATS, ORDERED, SUPER_BLOCK

TILE: Final = 64
"""The number of outputs in a tile."""

STEP: Final = 128
"""The number of inputs in a step."""

SPLIT_ROWS: Final = 64
"""The largest number of rows of products that are split over their inputs."""

SPLIT_PROGRAMS: Final = 512
"""The largest number of programs for a tile of rows of a product that is split."""


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """A format of the table.

    Attributes:
        bits: bits of a value.
        group: the number of inputs with one scale; 0 for one scale per output.
        scale_bytes: bytes of the scale of a group, with its zero point or minimum.
        block_bytes: bytes of the scales of 256 inputs.
    """

    bits: int
    group: int
    scale_bytes: int
    block_bytes: int = 0


FORMATS: Final = {
    "u4_g32": DeviceFormat(4, 32, 4),
    "u4_g128": DeviceFormat(4, 128, 4),
    "u8_g32": DeviceFormat(8, 32, 4),
    "q4_0": DeviceFormat(4, 32, 2),
    "q4_1": DeviceFormat(4, 32, 4),
    "q8_0": DeviceFormat(8, 32, 2),
    "int8": DeviceFormat(8, 0, 4),
    "f8_e4m3": DeviceFormat(8, 128, 4),
    "mxfp4": DeviceFormat(4, 32, 1),
    "q4_k": DeviceFormat(4, 32, 2, 4),
    "q6_k": DeviceFormat(6, 16, 1, 2),
}

SIGNED: Final = ("int8", "q8_0", "f8_e4m3", "mxfp4")
"""The formats whose kernels extend the sign of a byte."""


def num_tiles(out_features: int) -> int:
    return -(-out_features // TILE)


def num_steps(in_features: int) -> int:
    return -(-in_features // STEP)


def device_format(found: str) -> str | None:
    """The format on the device of a matrix in the format `found` of its file; None for the type of activations."""
    return found if found.removesuffix(ORDERED) in FORMATS else None


def is_converted(found: str) -> bool:
    """Whether a matrix is quantized in the file and not on the device."""
    return device_format(found) is None and found not in FLOATS


def device_parts(found: Sequence[str | None]) -> list[list[int]]:
    """The indices of matrices that are multiplied as one product, for each product.

    Args:
        found: the format on the device of each matrix. A matrix with its own order of inputs remains separate.
    """
    parts: list[list[int]] = []
    for index, name in enumerate(found):
        is_joined = index and name == found[index - 1] and (name is None or not name.endswith(ORDERED))
        if is_joined:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def weight_bytes(parts: Sequence[tuple[str, int]], in_features: int, value_bytes: int) -> int:
    """Bytes of matrices that are multiplied as one; see `KernelMemory.weight_bytes`.

    Args:
        value_bytes: bytes of an activation.
    """
    names = [device_format(name) for name, _ in parts]
    return sum(
        _matrix_bytes(names[first], sum(parts[index][1] for index in (first, *others)), in_features, value_bytes)
        for first, *others in device_parts(names)
    )


def _matrix_bytes(name: str | None, out_features: int, in_features: int, value_bytes: int) -> int:
    if name is None:
        return out_features * in_features * value_bytes
    kind = FORMATS[name.removesuffix(ORDERED)]
    steps, outputs = num_steps(in_features), num_tiles(out_features) * TILE
    groups = steps * STEP // kind.group if kind.group else 1
    blocks = -(-steps * STEP // SUPER_BLOCK)
    row = steps * STEP * kind.bits // 8 + groups * kind.scale_bytes + blocks * kind.block_bytes
    order = 8 * in_features if name.endswith(ORDERED) else 0
    return outputs * row + order
