"""The operations that torch computes in the layers of a model, of which native kernels leave none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.kernels.attention import StepContext
from chairlift.kernels.interface import Layer, run_in_order


class ComputedByTorch(TorchDispatchMode):
    """Runs the layers of a model, in the place of `Kernels.run_layers`, and notes the operations that torch computes.

    Attributes:
        names: the operations that are no views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view:
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    def run_layers(self, layers: Sequence[Layer], x: torch.Tensor, step: StepContext) -> torch.Tensor:
        with self:
            return run_in_order(layers, x, step)
