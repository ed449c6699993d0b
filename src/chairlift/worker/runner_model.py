"""RunnerModel: the interface of the models that a runner computes."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.recurrence import StateStep


class RunnerModel(Protocol):
    """The methods of a model that the runner calls."""

    def plan(self, *metadata: AttentionMetadata, states: StateStep | None = None) -> Any:
        """Prepare the attention of a step from the metadata of each group of layers."""
        ...

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """Compute int64 [T], int64 [T] -> hidden states [T, hidden], and write K and V to the slots of the plan."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute [N, hidden] -> float32 [N, V] in a tensor that the caller may change."""
        ...
