"""The sum of the residual stream and a branch."""

from __future__ import annotations

import torch

from chairlift.kernels.linear import RowKernel


class ResidualSum:
    """of_sum(stream + multiplier * after(branch)).

    Args:
        after, of_sum: None leaves rows as they are.
    """

    def __init__(self, after: RowKernel | None, of_sum: RowKernel | None, multiplier: float) -> None:
        self._after = after
        self._of_sum = of_sum
        self._multiplier = multiplier
        self._is_fused = after is None and multiplier == 1

    def fused(self, stream: torch.Tensor) -> torch.Tensor | None:
        """What the branch's last product adds itself: the stream, unless something comes between product and sum."""
        return stream if self._is_fused else None

    def __call__(self, stream: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """The sum, computed in the memory of `stream`; `branch` holds it already where `fused` gave the stream."""
        if not self._is_fused:
            if self._after is not None:
                branch = self._after(branch)
            branch = stream.add_(branch, alpha=self._multiplier)
        return branch if self._of_sum is None else self._of_sum(branch)
