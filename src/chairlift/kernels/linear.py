"""The seam of linear layers: what is done to a row before the product, and what the product is added to.

    x [T, in] -> prologue -> product with a matrix [out, in] -> + bias -> + residual -> [T, out]

Norms and activations stand before a product because that is where a kernel reads the row anyway, and where one that
multiplies integers quantizes it.
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
"""[T, n] -> [T, m], every row by itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """What a linear layer does to each row first.

    Attributes:
        kind: "none", one of NORM_KINDS, or a row kernel of `kernels.activations`: a gated one takes rows twice as wide
            as it gives; all others leave the width.
        weight: [in], of the norms.
        bias: [in], of "layer_norm".
        eps: of the norms.
    """

    kind: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 0.0


NO_PROLOGUE = Prologue("none")
SILU_AND_MUL = Prologue("silu_and_mul")
RELU = Prologue("relu")


class LinearKernel(Protocol):
    """A linear layer with its prologue."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """linear(prologue(x)), plus `residual` [T, out] if there is one.

        The caller gives `residual` up: the sum may be computed in its memory. The result may be overwritten by the next
        call of a layer of the same name (`q_proj`, `down_proj`...).
        """
        ...


class ComposedLinear:
    """A `LinearKernel` of three kernels, one after the other.

    Args:
        prologue: None leaves rows as they are.
        product: with the matrix, plus bias.
    """

    def __init__(self, prologue: RowKernel | None, product: RowKernel) -> None:
        self._prologue = prologue
        self._product = product

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self._product(x if self._prologue is None else self._prologue(x))
        return y if residual is None else residual.add_(y)
