"""What weights from a file have in common: shapes are checked, and what nobody asked for is remembered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import PackedRows
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

    @abstractmethod
    def _read_packed(self, name: str, file_name: str, shape: tuple[int, int]) -> PackedRows:
        """The matrix on the CPU, its shape checked, its rows in the order of the file."""

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """The rows of the file in the order of Hugging Face; None: it is the same."""
        return None

    @abstractmethod
    def _file_names(self) -> Iterable[str]:
        """Every tensor of the file that a model should ask for."""

    def has(self, name: str) -> bool:
        """See Weights.has."""
        return self._file_name(name) is not None

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See Weights.tensor."""
        file_name = self._find(name)
        tensor = self._read(name, file_name)
        self._check(file_name, tuple(tensor.shape), shape)
        self._check_type(file_name, tensor)
        order = self._row_order(name, shape[0])
        return (tensor if order is None else tensor[order]).to(device=self.device, dtype=self.dtype).contiguous()

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        """See Weights.packed."""
        file_name = self._find(name)
        packed = self._read_packed(name, file_name, shape)
        order = self._row_order(name, shape[0])
        return packed if order is None else replace(packed, rows=packed.rows[order])

    def _find(self, name: str) -> str:
        """What the file calls the parameter, which counts as asked for from now on."""
        file_name = self._file_name(name)
        if file_name is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name} is missing; the file is incomplete or does not match its configuration"
            )
        self._asked.add(file_name)
        return file_name

    def _check(self, file_name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelLoadError(
                f"{self.path}: tensor {file_name} has the shape {found}, and the configuration asks for {shape}"
            )

    def _check_type(self, file_name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_floating_point():
            raise ModelLoadError(
                f"{self.path}: tensor {file_name} is {tensor.dtype}; quantized models are read from GGUF files only"
            )

    def unused(self) -> list[str]:
        """Tensors that were never asked for, by the file's own names; a model that loaded right leaves none."""
        return sorted(set(self._file_names()) - self._asked)
