"""FileWeights: the common part of weights from files, which checks shapes and records the tensors that are read."""

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
from chairlift.models.declaration import ModelConfig


class FileWeights(ABC):
    """A `Weights` over the named tensors of a file or folder.

    Args:
        path: the file or folder.
        config: the declaration of the model.
        dtype, device: the type and device of the tensors that `tensor` returns.
    """

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.path = path
        self.config = config
        self.dtype = dtype
        self.device = device
        self._tensors_read: set[str] = set()

    @abstractmethod
    def _file_name(self, name: str) -> str | None:
        """Return the name of the parameter in the file, or None if the file does not contain it."""

    def _expected_name(self, name: str) -> str:
        """Return the name that the parameter should have in the file."""
        return name

    @abstractmethod
    def _read(self, name: str, file_name: str) -> torch.Tensor:
        """Return the tensor, on the CPU or on the device, in any type."""

    @abstractmethod
    def _read_packed(self, name: str, file_name: str, shape: tuple[int, int]) -> PackedRows:
        """Check the shape of the matrix, and return it on the CPU with its rows in the order of the file."""

    def _row_order(self, name: str, num_rows: int) -> npt.NDArray[np.int64] | None:
        """Return the indices of the file's rows in the order of Hugging Face, or None if the order is the same."""
        return None

    @abstractmethod
    def _file_names(self) -> Iterable[str]:
        """Return the names of the tensors in the file, without those that are computed instead of read."""

    @abstractmethod
    def _check_format(self, file_name: str) -> None:
        """Raise ModelLoadError if values of the tensor's type cannot be read."""

    def check_formats(self) -> None:
        """Check the types of all tensors in the file, without reading their values.

        Raises:
            ModelLoadError: A type is not supported.
        """
        for file_name in self._file_names():
            self._check_format(file_name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file_name = self._find(name)
        tensor = self._read(name, file_name)
        self._check(file_name, tuple(tensor.shape), shape)
        order = self._row_order(name, shape[0])
        return (tensor if order is None else tensor[order]).to(device=self.device, dtype=self.dtype).contiguous()

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        file_name = self._find(name)
        packed = self._read_packed(name, file_name, shape)
        order = self._row_order(name, shape[0])
        return packed if order is None else replace(packed, rows=packed.rows[order])

    def _find(self, name: str) -> str:
        """Return the name of the parameter in the file, and record that it is read."""
        file_name = self._file_name(name)
        if file_name is None:
            raise ModelLoadError(
                f"{self.path}: tensor {self._expected_name(name)} is missing; the file is incomplete or does not match "
                "its configuration: download it again"
            )
        self._tensors_read.add(file_name)
        return file_name

    def _check(self, file_name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise ModelLoadError(
                f"{self.path}: tensor {file_name} has the shape {found}, but the configuration requires {shape}; "
                "use the configuration that belongs to the weights"
            )

    def unused(self) -> list[str]:
        """Return the file's names of the tensors that were not read. After a complete load there are none."""
        return sorted(set(self._file_names()) - self._tensors_read)
