"""Working memory of native kernels, kept from step to step."""

from __future__ import annotations

import torch


class RowBuffers:
    """Memory for the rows that kernels put out, one piece a purpose, shared by all layers and steps.

    Attributes:
        moves: how often rows got other memory than before.
    """

    def __init__(self) -> None:
        self.moves = 0
        self._whole: dict[tuple[str, int], torch.Tensor] = {}
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def rows(self, key: tuple[str, int], num_rows: int) -> torch.Tensor:
        """float32 [num_rows, width] for a purpose and width; what was there is lost."""
        rows = self._rows.get(key)
        if rows is None or rows.shape[0] != num_rows:
            rows = self._rows[key] = self._cut(key, num_rows)
        return rows

    def _cut(self, key: tuple[str, int], num_rows: int) -> torch.Tensor:
        whole = self._whole.get(key)
        if whole is None or whole.shape[0] < num_rows:
            whole = self._whole[key] = torch.empty((num_rows, key[1]))
            self.moves += 1
        return whole[:num_rows]
