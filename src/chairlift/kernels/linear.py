"""The interface of linear layers: the prologue of each row, the product with a matrix, and the sum with a residual.

    x [T, in] -> prologue -> product with a matrix [out, in] -> + bias -> + residual -> [T, out]

Norms and activation functions belong to the product that follows them: its kernel reads the row there anyway, and a
kernel that multiplies integers quantizes it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import torch

NativePrologueKind = Literal["none", "rms_norm", "layer_norm", "silu_and_mul", "relu"]
"""The prologues that native kernels have."""

NORM_KINDS: Final = ("rms_norm", "layer_norm")
RowKernel = Callable[[torch.Tensor], torch.Tensor]
"""A function of rows, [T, n] -> [T, m]; the result of a row depends on this row alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """What a linear layer does to each row first.

    Attributes:
        kind: "none", one of NORM_KINDS, or a row kernel of `kernels.activations`: a gated one takes rows twice as wide
            as it gives; all others leave the width.
        weight: [in], the weight of a norm.
        bias: [in], the bias of "layer_norm".
        eps: the epsilon of a norm.
    """

    kind: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 0.0


NO_PROLOGUE = Prologue("none")
SILU_AND_MUL = Prologue("silu_and_mul")
RELU = Prologue("relu")


class LinearKernel(Protocol):
    """A linear layer and its prologue."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """linear(prologue(x)), plus `residual` [T, out] unless it is None.

        The sum may be computed in the memory of `residual`, whose values are lost. The next call of a layer of the same
        name (`q_proj`, `down_proj`...) may overwrite the result.
        """
        ...


class ComposedLinear:
    """A `LinearKernel` that calls a prologue, a product and a sum one after the other.

    Args:
        prologue: None leaves rows as they are.
        product: the product with the matrix, plus the bias.
    """

    def __init__(self, prologue: RowKernel | None, product: RowKernel) -> None:
        self._prologue = prologue
        self._product = product

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self._product(x if self._prologue is None else self._prologue(x))
        return y if residual is None else residual.add_(y)
