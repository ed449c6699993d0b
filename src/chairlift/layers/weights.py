"""Where parameters come from, as layers and models see it."""

from __future__ import annotations

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
