"""Random weights, which replace a download in benchmarks and tests."""

from __future__ import annotations

import hashlib
from typing import Final

import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PackedRows, packed_tensor
from chairlift.models.declaration.model_config import ModelConfig

STD: Final = 0.02
BIAS_SUFFIX: Final = ".bias"


class RandomWeights:
    """A `Weights` that has every parameter: ones for norms and scales of layers, zeros for biases, and N(0, 0.02^2) for
    the others.

    The values depend on the seed, the name, the shape, the type and the kind of device, and not on the order of calls.
    They are drawn on the device and rounded to the type of the model's files.

    Raises:
        ModelLoadError: the model is quantized.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        if config.quantization is not None:
            raise ModelLoadError(
                "random weights are not quantized, but config.json has quantization_config "
                f"({config.quantization.method}): remove it from a copy of the file, or use --load-format auto"
            )
        self.config = config
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self._file_dtype: torch.dtype = getattr(torch, config.dtype)
        norms = (f"{name}.weight" for name in config.norm_names)
        self._ones = frozenset((*norms, *(layer.output_scale for layer in config.layers)))

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name in self._ones:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        if name.endswith(BIAS_SUFFIX):
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(self._seed_of(name))
        drawn = torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, STD, generator=generator)
        return drawn.to(self._file_dtype).to(self.dtype)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        return packed_tensor(self.tensor(name, shape).to("cpu", self._file_dtype))

    def notes(self) -> list[str]:
        return []

    def check_all_read(self) -> None:
        return

    def _seed_of(self, name: str) -> int:
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        return int.from_bytes(digest[:7], "little")
