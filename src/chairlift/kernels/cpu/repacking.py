"""Conversion of the matrices of a file to native formats, and its error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from chairlift.kernels.weight_formats import ORDERED
from chairlift.kernels.weights import PackedRows

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
    if part.format.removesuffix(ORDERED) == matrix.format:
        matrix.pack_blocks(first_row, np.ascontiguousarray(part.rows))
        if part.input_order is not None:
            matrix.set_input_order(part.input_order.tolist())
        return
    if part.format == "bf16":
        matrix.pack_bfloat16(first_row, np.ascontiguousarray(part.rows).view(np.uint16))
        return
    step = max(1, VALUES_AT_ONCE // part.in_features)
    for start in range(0, len(part.rows), step):
        rows = np.ascontiguousarray(part.rows[start : start + step])
        matrix.pack_floats(first_row + start, np.ascontiguousarray(part.to_floats(rows)))


def is_exact(source: str, target: str) -> bool:
    """Whether the target format represents every value of the source format, as float32, exactly."""
    return target in (source.removesuffix(ORDERED), "f32")


def repacking_notes(losses: Iterable[tuple[tuple[str, str], RepackingLoss]]) -> list[str]:
    """One line for each pair of formats (source, target)."""
    return [
        f"{loss.num_matrices} matrices repacked from {source} to {target}: the error is {loss.relative_error:.2%} of "
        "the root mean square of the values"
        for (source, target), loss in losses
    ]
