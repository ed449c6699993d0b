"""Linear layers, fused where several read the same input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chairlift.kernels.registry import Kernels
from chairlift.layers.weights import Weights


class Linear:
    """One or several linear layers over the same input as one product: [T, in] -> [T, sum of outs].

    Args:
        parts: (name, out_features) of each, in the order of the output; `<name>.weight` is [out, in].
        bias: whether each part has a `<name>.bias` [out].
    """

    def __init__(
        self, kernels: Kernels, weights: Weights, parts: Sequence[tuple[str, int]], in_features: int, *, bias: bool
    ) -> None:
        weight = [weights.tensor(f"{name}.weight", (out, in_features)) for name, out in parts]
        biases = [weights.tensor(f"{name}.bias", (out,)) for name, out in parts] if bias else []
        self._apply = kernels.make_linear(_fuse(weight), _fuse(biases) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply(x)


def _fuse(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
