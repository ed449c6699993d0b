"""From token ids to vectors and back."""

from __future__ import annotations

import torch

from chairlift.kernels.registry import Kernels
from chairlift.layers.weights import Weights


class Embedding:
    """A table [num_rows, size], looked up by int64 ids: [T] -> [T, size]."""

    def __init__(self, kernels: Kernels, weights: Weights, name: str, num_rows: int, size: int) -> None:
        self.weight = weights.tensor(f"{name}.weight", (num_rows, size))
        self._kernels = kernels

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._kernels.embedding(ids, self.weight)


class LMHead:
    """Logits over the vocabulary: [N, size] -> float32 [N, vocab_size]. Tied: its weight is the embedding's table."""

    def __init__(
        self,
        kernels: Kernels,
        weights: Weights,
        name: str,
        vocab_size: int,
        size: int,
        tied_to: Embedding | None,
    ) -> None:
        weight = weights.tensor(f"{name}.weight", (vocab_size, size)) if tied_to is None else tied_to.weight
        self._apply = kernels.make_linear(weight, None)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._apply(hidden).float()
