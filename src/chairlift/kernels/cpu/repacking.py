"""Conversion of the matrices of a file to native formats, and its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from chairlift.kernels.cpu.formats import FLOATS
from chairlift.kernels.weights import ByteArray, PackedRows

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

VALUES_AT_ONCE: Final = 1 << 20
"""The number of values that are converted to float32 at a time."""

MEASURED_ROWS: Final = 64
"""The number of rows of each matrix whose error is measured, at equal distances."""


@dataclass(slots=True)
class RepackingLoss:
    """The error of all matrices that were converted from one format to another.

    Attributes:
        squared_error, squared: sums of the squares of errors and of values, over the measured rows.
    """

    num_matrices: int = 0
    squared_error: float = 0.0
    squared: float = 0.0

    @property
    def relative_error(self) -> float:
        """The root of the mean squared error, divided by the root of the mean square."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

    def add(self, matrix: _native.PackedMatrix, first_row: int, part: PackedRows) -> None:
        """Measure the error of rows of `part` that are in `matrix` from `first_row` on, and add it to the sums."""
        chosen = np.unique(np.linspace(0, len(part.rows) - 1, MEASURED_ROWS, dtype=np.int64))
        expected = part.to_floats(np.ascontiguousarray(part.rows[chosen]))
        values = np.concatenate([matrix.unpack(first_row + int(row), 1) for row in chosen])
        self.num_matrices += 1
        self.squared_error += float(np.square(values - expected, dtype=np.float64).sum())
        self.squared += float(np.square(expected, dtype=np.float64).sum())


def pack(matrix: _native.PackedMatrix, first_row: int, part: PackedRows) -> None:
    """Write rows to a `PackedMatrix` from `first_row` on, in its format."""
    if part.format == matrix.format:
        matrix.pack_blocks(first_row, np.ascontiguousarray(part.rows))
        return
    to_blocks = SAME_VALUES.get((part.format, matrix.format))
    step = max(1, VALUES_AT_ONCE // part.in_features)
    for start in range(0, len(part.rows), step):
        rows = np.ascontiguousarray(part.rows[start : start + step])
        if to_blocks is not None:
            matrix.pack_blocks(first_row + start, to_blocks(rows))
        else:
            matrix.pack_floats(first_row + start, np.ascontiguousarray(part.to_floats(rows)))


def is_exact(source: str, target: str) -> bool:
    """Whether the target format represents every value of the source format exactly."""
    return source == target or (source in FLOATS and target == "f32")


def repacking_notes(losses: Iterable[tuple[tuple[str, str], RepackingLoss]]) -> list[str]:
    """One line for each pair of formats (source, target)."""
    return [
        f"{loss.num_matrices} matrices repacked from {source} to {target}: the error is {loss.relative_error:.2%} of "
        "the root mean square of the values"
        for (source, target), loss in losses
    ]


# -- conversions of blocks that keep all values, except for the rounding of scales -----------------------------------


def _q4_0_to_q4_1(rows: ByteArray) -> ByteArray:
    """Convert with scale * (q - 8) = scale * q + minimum, where the minimum is -8 * scale."""
    blocks = rows.reshape(len(rows), -1, 18)
    scale = blocks[..., :2].copy().view(np.float16)
    minimum = (scale * np.float16(-8)).view(np.uint8)
    return np.concatenate((blocks[..., :2], minimum, blocks[..., 2:]), axis=-1).reshape(len(rows), -1)


def _q4_k_to_q4_1(rows: ByteArray) -> ByteArray:
    """Convert blocks of 256 values in 8 groups of 32, each with a scale and a minimum of 6 bits.

    These are factors of the scale d and the minimum dmin of the block. Its bytes are:

    d (f16), dmin (f16) | 12 bytes of scales and minimums | 128 bytes: groups 2j (low) and 2j + 1 (high) in 32 each
    """
    blocks = rows.reshape(len(rows), -1, 144)
    d, dmin = (blocks[..., i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=-1)
    minimums = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=-1)
    halves = np.stack((d * scales, -dmin * minimums), axis=-1).astype(np.float16)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    groups = np.concatenate((pairs & 15, pairs >> 4), axis=-2).reshape(*blocks.shape[:2], 8, 32)
    values = groups[..., :16] | (groups[..., 16:] << 4)
    return np.concatenate((halves.view(np.uint8), values), axis=-1).reshape(len(rows), -1)


SAME_VALUES: Final[dict[tuple[str, str], Callable[[ByteArray], ByteArray]]] = {
    ("q4_0", "q4_1"): _q4_0_to_q4_1,
    ("q4_k", "q4_1"): _q4_k_to_q4_1,
}
"""(source, target) -> the conversion of rows of blocks."""
