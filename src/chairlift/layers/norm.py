"""Normalization layers."""

from __future__ import annotations

import torch

from chairlift.kernels.registry import Kernels
from chairlift.layers.weights import Weights


class RMSNorm:
    """RMSNorm over the last dimension, `size` wide."""

    def __init__(self, kernels: Kernels, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.tensor(f"{name}.weight", (size,))
        self._eps = eps
        self._norm = kernels.rms_norm
        self._add_norm = kernels.add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return self._add_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """LayerNorm with weight and bias over the last dimension, `size` wide."""

    def __init__(self, kernels: Kernels, weights: Weights, name: str, size: int, eps: float) -> None:
        self._weight = weights.tensor(f"{name}.weight", (size,))
        self._bias = weights.tensor(f"{name}.bias", (size,))
        self._eps = eps
        self._norm = kernels.layer_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._weight, self._bias, self._eps)
