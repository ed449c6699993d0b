"""GGUFWeights: the parameters in a GGUF file, dequantized or in the format of the file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import cache, partial
from typing import Final

import gguf
import numpy as np
import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.weights import ByteArray, FloatArray, PackedRows, packed_tensor
from chairlift.loading.file_weights import FileWeights
from chairlift.loading.gguf_file import ROPE_FACTORS, UNSCALED, GGUFFile
from chairlift.models.declaration.model_config import ModelConfig
from chairlift.models.quantization import ACTIVATION_SCALES
from chairlift.models.reading.architecture import StoredName
from chairlift.models.registry import get_architecture

VALUES_PER_ROW: Final = 8192
DECAYS: Final = ".ssm_a"
"""The end of the names of decays, which are -exp(A_log) in GGUF files."""

GROUPED_NORMS: Final = ".ssm_norm.weight"
"""The end of the names of norms that have a row for each group of values in GGUF files."""


class GGUFWeights(FileWeights):
    """A `Weights` over a GGUF file, for every quantization that the package `gguf` can dequantize.

    Raises:
        ModelLoadError: a tensor has a quantization that `gguf` cannot dequantize.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        # Layers that predict further tokens follow the layers of the model.
        further = file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers", 0)
        numbers = range(len(config.all_layers), len(config.layers) + further)
        unread = tuple(f"blk.{number}." for number in numbers)
        super().__init__(file.path, config, dtype, device, unread, ACTIVATION_SCALES)
        self._file = file
        self._architecture = get_architecture(config)
        self._interleaved = interleaved_modules(config)

    def _places(self, name: str) -> list[StoredName]:
        found = self._architecture.gguf_name(name)
        if found is not None and name.rpartition(".")[0] in self._interleaved:
            found = found._replace(block="pair")
        return [] if found is None else self._with_parts(name, [found])

    def _names(self) -> Collection[str]:
        return self._file.tensors

    def _shape(self, file_name: str) -> tuple[int, ...]:
        shape = self._file.tensors[file_name].shape
        return (math.prod(shape),) if file_name.endswith(GROUPED_NORMS) else shape

    def _read(self, stored: StoredName) -> torch.Tensor:
        scale = self._scale(stored)
        if stored.part is not None:
            rows = stored.select_rows(self._raw(stored), self._head_dim)
            return torch.from_numpy(dequantize(self._file, stored.name, rows, scale))
        shape = self._shape(stored.name)[0 if stored.expert is None else 1 :]
        values = torch.from_numpy(dequantize(self._file, stored.name, self._raw(stored), scale).reshape(-1, *shape[1:]))
        values = stored.select_rows(values, self._head_dim)
        return torch.log(-values) if stored.name.endswith(DECAYS) else values

    def _read_packed(self, stored: StoredName) -> PackedRows:
        tensor, scale = self._file.tensors[stored.name], self._scale(stored)
        rows = stored.select_rows(self._raw(stored), self._head_dim)
        name = self._file.packed_format(stored.name, self._architecture.gguf_scale(stored.name))
        if name == UNSCALED:
            return packed_tensor(torch.from_numpy(dequantize(self._file, stored.name, rows, scale)))
        return PackedRows(name, rows, tensor.shape[-1], partial(dequantize, self._file, stored.name, scale=scale))

    def _scale(self, stored: StoredName) -> float:
        """Return the factor of a matrix, which llama.cpp's converter stores in a tensor of its own for NVFP4."""
        name = self._architecture.gguf_scale(stored.name)
        if name not in self._file.tensors:
            return 1.0
        self._tensors_read.add(name)
        values = dequantize(self._file, name).ravel()
        num_scales = 1 if stored.expert is None else self._num_experts
        if len(values) != num_scales or not np.isfinite(values).all():
            raise ModelLoadError(f"{self.path}: tensor {name} must have {num_scales} finite numbers; download it again")
        return float(values[stored.expert or 0])

    def _raw(self, stored: StoredName) -> ByteArray:
        raw = self._file.raw(stored.name)
        if stored.expert is not None:
            num_rows = len(raw) // self._num_experts
            raw = raw[stored.expert * num_rows : (stored.expert + 1) * num_rows]
        return raw

    def _check_format(self, file_name: str) -> None:
        _check_type(self._file, file_name)

    def _file_names(self) -> Iterable[str]:
        return (name for name in self._file.tensors if name not in ROPE_FACTORS and not name.startswith(self._unread))


def interleaved_modules(config: ModelConfig) -> frozenset[str]:
    """Return the query and key projections in whose rows the converter to GGUF makes rotated pairs adjacent: ggml
    rotates the pairs (2i, 2i + 1), and Hugging Face (i, i + head_dim / 2)."""
    if config.name not in get_architecture(config).gguf_interleaved:
        return frozenset()
    return frozenset(name for spec in config.attention_specs.values() for name, _ in spec.qkv.parts[:2])


def dequantize(file: GGUFFile, name: str, raw: ByteArray | None = None, scale: float = 1.0) -> FloatArray:
    """Return a tensor in float32, in writable memory.

    Args:
        raw: some rows of the tensor, uint8 [n, bytes per row]; None for all of them.
        scale: the factor of all values.

    Raises:
        ModelLoadError: `gguf` cannot dequantize the tensor.
    """
    kind, shape = file.tensors[name].type, file.tensors[name].shape
    if raw is None:
        raw = file.raw(name)
    else:
        shape = (len(raw), shape[-1])
    _check_type(file, name)
    values = gguf.dequantize(_regroup(raw, kind), kind)
    if scale != 1.0:
        values = values * np.float32(scale)
    return np.require(values, dtype=np.float32, requirements=["C", "W"]).reshape(shape)


def _check_type(file: GGUFFile, name: str) -> None:
    kind = file.tensors[name].type
    if kind not in dequantized_types():
        raise ModelLoadError(
            f"{file.path}: tensor {name} has type {kind.name}, which the gguf package cannot dequantize; use another "
            "quantization of the model, such as Q4_K or Q8_0"
        )


@cache
def dequantized_types() -> frozenset[gguf.GGMLQuantizationType]:
    """The types that the gguf package can dequantize, which is found out with one block of zeros."""
    return frozenset(kind for kind, (_, num_bytes) in gguf.GGML_QUANT_SIZES.items() if _is_dequantized(kind, num_bytes))


def _is_dequantized(kind: gguf.GGMLQuantizationType, num_bytes: int) -> bool:
    try:
        gguf.dequantize(np.zeros((1, num_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _regroup(raw: ByteArray, kind: gguf.GGMLQuantizationType) -> ByteArray:
    """Reshape independent blocks to rows of about VALUES_PER_ROW, since `gguf` is slow for short rows."""
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    num_blocks = raw.size // bytes_per_block
    blocks_per_row = math.gcd(num_blocks, max(1, VALUES_PER_ROW // values_per_block))
    return raw.reshape(-1, blocks_per_row * bytes_per_block)
