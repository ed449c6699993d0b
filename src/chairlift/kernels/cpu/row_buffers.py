"""Memory for the results of a step, which all steps share."""

from __future__ import annotations

import torch


class RowBuffers:
    """One buffer of float32 rows for each purpose, shared by all layers and steps.

    Attributes:
        num_allocations: how often a buffer was allocated, which changes when the address of a buffer changes.
    """

    def __init__(self) -> None:
        self.num_allocations = 0
        self._whole: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def rows(self, key: tuple[str, int], num_rows: int) -> torch.Tensor:
        """The buffer for a purpose and width, [num_rows, width]; earlier contents are lost.

        Args:
            key: (purpose, width).
            num_rows: the number of rows; the buffer grows if necessary.
        """
        rows = self._rows.get(key)
        if rows is None or rows.shape[0] != num_rows:
            whole = self._whole.get(key)
            if whole is None or whole.shape[0] < num_rows:
                whole = self._whole[key] = torch.empty((num_rows, key[1]))
                self.num_allocations += 1
            rows = self._rows[key] = whole[:num_rows]
        return rows


def rows_of(x: torch.Tensor) -> tuple[int, int]:
    """Return the address of rows [n, m] as native kernels read them, and the distance between two rows in values."""
    assert x.dtype == torch.float32, "native kernels compute in float32"
    assert x.stride(1) == 1, "each row must be contiguous"
    return x.data_ptr(), x.stride(0)
