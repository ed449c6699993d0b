"""Normalizations, as what a linear layer does to its input first."""

from __future__ import annotations

from chairlift.kernels.linear import Prologue
from chairlift.kernels.weights import Weights


def rms_norm(weights: Weights, name: str, size: int, eps: float) -> Prologue:
    """RMSNorm over rows `size` wide."""
    return Prologue("rms_norm", weights.tensor(f"{name}.weight", (size,)), eps=eps)


def layer_norm(weights: Weights, name: str, size: int, eps: float) -> Prologue:
    """LayerNorm with weight and bias over rows `size` wide."""
    weight, bias = (weights.tensor(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
    return Prologue("layer_norm", weight, bias, eps)
