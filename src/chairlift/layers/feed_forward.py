"""A feed-forward network: two products with an activation between them."""

from __future__ import annotations

import torch

from chairlift.layers.linear import Linear


class FeedForward:
    """down(activation(up(x))), the activation being the prologue of `down`: [T, hidden_size] -> [T, hidden_size]."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Plus `residual` if there is one, which the caller gives up."""
        return self.down(self.up(x), residual)
