"""Where parameters come from, as kernels, layers and models see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Weights(Protocol):
    """A source of named parameters: a safetensors folder, a GGUF file, or random numbers.

    Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`), whatever the file calls them.
    """

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter, in the compute dtype, on the compute device, contiguous.

        Raises:
            ModelLoadError: it is missing, damaged or of another shape; says which file and key.
        """
        ...

    def has(self, name: str) -> bool:
        """Whether the source holds the parameter (a random source holds everything)."""
        ...


MatrixParts = Sequence[tuple[str, int]]
"""(name, out_features) of matrices over the same input that are multiplied as one, in the order of the output."""


def load_tensor(weights: Weights, parts: MatrixParts, in_features: int) -> torch.Tensor:
    """The `<name>.weight` of all parts, one below the other: [sum of outs, in], in the compute dtype."""
    tensors = [weights.tensor(f"{name}.weight", (out, in_features)) for name, out in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
