"""Token embedding and LM head."""

from __future__ import annotations

import torch

from chairlift.kernels.interface import Kernels
from chairlift.kernels.linear import NO_PROLOGUE, Prologue
from chairlift.kernels.weights import Weights


class Embedding:
    """Rows of a table [num_rows, size] by int64 id: [T] -> [T, size]."""

    def __init__(self, kernels: Kernels, weights: Weights, name: str, num_rows: int, size: int) -> None:
        self.matrix = kernels.load_matrix(weights, [(name, num_rows)], size)
        self._look_up = kernels.make_embedding(self.matrix)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._look_up(ids)


class LMHead:
    """Logits over the vocabulary: [N, size] -> float32 [N, vocab_size]. A tied head uses the table of the embedding."""

    def __init__(
        self,
        kernels: Kernels,
        weights: Weights,
        name: str,
        vocab_size: int,
        size: int,
        *,
        tied_to: Embedding | None,
        prologue: Prologue = NO_PROLOGUE,
    ) -> None:
        matrix = kernels.load_matrix(weights, [(name, vocab_size)], size) if tied_to is None else tied_to.matrix
        self._apply = kernels.make_linear(matrix, None, prologue)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._apply(hidden).float()
