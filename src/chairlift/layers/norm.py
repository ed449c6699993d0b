"""Normalizations, as prologues of linear layers."""

from __future__ import annotations

from chairlift.kernels.linear import Prologue
from chairlift.kernels.weights import Weights


def rms_norm(weights: Weights, name: str, size: int, eps: float) -> Prologue:
    """RMSNorm over rows of `size` values."""
    return Prologue("rms_norm", weights.tensor(f"{name}.weight", (size,)), eps=eps)


def layer_norm(weights: Weights, name: str, size: int, eps: float) -> Prologue:
    """LayerNorm with weight and bias over rows of `size` values."""
    weight, bias = (weights.tensor(f"{name}.{part}", (size,)) for part in ("weight", "bias"))
    return Prologue("layer_norm", weight, bias, eps)
