"""What weights from a file have in common: shapes are checked, and what nobody asked for is remembered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import torch

from chairlift.errors import ModelLoadError
from chairlift.models.config import ModelConfig


class FileWeights(ABC):
    """A `Weights` over named tensors of a file or folder.

    Args:
        path: of the file or folder.
        config: of the model that the tensors belong to.
        dtype, device: what `tensor` returns is converted to and put on.
    """

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.path = path
        self.config = config
        self.dtype = dtype
        self.device = device
        self._asked: set[str] = set()

    @abstractmethod
    def _file_name(self, name: str) -> str | None:
        """What the file calls the parameter; None if it does not hold it."""

    @abstractmethod
    def _read(self, name: str, file_name: str) -> torch.Tensor:
        """The tensor on the CPU, or on the device, in any float dtype."""

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as Hugging Face lays it out, its shape known to be right."""
        return tensor

    @abstractmethod
    def _file_names(self) -> Iterable[str]:
        """Every tensor of the file that a model should ask for."""

    def has(self, name: str) -> bool:
        """See Weights.has."""
        return self._file_name(name) is not None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See Weights.tensor."""
        file_name = self._file_name(name)
        if file_name is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is missing; the file is incomplete or does not match its configuration"
            )
        self._asked.add(file_name)
        tensor = self._read(name, file_name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.path}: tensor {file_name} has the shape {tuple(tensor.shape)}, and the configuration "
                f"asks for {shape}"
            )
        if not tensor.is_floating_point():
            raise ModelLoadError(
                f"{self.path}: tensor {file_name} is {tensor.dtype}; quantized models are read from GGUF files only"
            )
        return self._arrange(name, tensor).to(device=self.device, dtype=self.dtype).contiguous()

    def unused(self) -> list[str]:
        """Tensors that were never asked for, by the file's own names; a model that loaded right leaves none."""
        return sorted(set(self._file_names()) - self._asked)
