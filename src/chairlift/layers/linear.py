"""Linear layers; those with the same input are fused into one product."""

from __future__ import annotations

import torch

from chairlift.kernels.interface import Kernels
from chairlift.kernels.linear import NO_PROLOGUE, Prologue
from chairlift.kernels.weights import MatrixParts, Weights


class Linear:
    """One or several linear layers with the same input, as one product: [T, in] -> [T, sum of out_features].

    Args:
        parts: (name, out_features) of each; its `<name>.weight` is [out, in].
        bias: whether each part has a `<name>.bias` [out].
        prologue: the function of the input before the product.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: Weights,
        parts: MatrixParts,
        in_features: int,
        *,
        bias: bool = False,
        prologue: Prologue = NO_PROLOGUE,
    ) -> None:
        matrix = kernels.load_matrix(weights, parts, in_features)
        biases = torch.cat([weights.tensor(f"{name}.bias", (out,)) for name, out in parts]) if bias else None
        self._apply = kernels.make_linear(matrix, biases, prologue)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """linear(prologue(x)), plus `residual` unless it is None; the sum may be computed in its memory."""
        return self._apply(x, residual)
