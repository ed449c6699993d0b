"""Weights out of a GGUF file, dequantized."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch

from chairlift.errors import ModelLoadError
from chairlift.loading.file_weights import FileWeights
from chairlift.loading.gguf_file import ROPE_FREQS, GGUFFile, GGUFTensor
from chairlift.models.config import ModelConfig

MODEL_ARCHS: Final = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
PERMUTED: Final = {"q_proj": "num_heads", "k_proj": "num_kv_heads"}
PERMUTED_ARCHS: Final = ("llama",)
VALUES_PER_ROW: Final = 8192


class GGUFWeights(FileWeights):
    """A `Weights` over a GGUF file, in every quantization that `gguf` can undo.

    Args:
        file: the open file, if there is one already.

    Raises:
        ModelLoadError: see GGUFFile; and for a quantization that `gguf` cannot undo.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        file: GGUFFile | None = None,
    ) -> None:
        super().__init__(path, config, dtype, device)
        self._file = file or GGUFFile(path)
        self._names = gguf.get_tensor_name_map(MODEL_ARCHS[config.name], config.num_layers)

    def _file_name(self, name: str) -> str | None:
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found if found in self._file.tensors else None

    def _read(self, name: str, file_name: str) -> torch.Tensor:
        return torch.from_numpy(dequantize(self._file, file_name))

    def _arrange(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        module = name.split(".")[-2]
        if self.config.name in PERMUTED_ARCHS and module in PERMUTED:
            return unpermute(tensor, getattr(self.config, PERMUTED[module]))
        return tensor

    def _file_names(self) -> Iterable[str]:
        return (name for name in self._file.tensors if name != ROPE_FREQS)


def dequantize(file: GGUFFile, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """A tensor in float32, writable.

    Raises:
        ModelLoadError: `gguf` cannot undo its quantization.
    """
    tensor = file.tensors[name]
    try:
        values = gguf.dequantize(_regroup(file, tensor), tensor.type)
    except NotImplementedError as error:
        raise ModelLoadError(
            f"{file.path}: tensor {name} is quantized as {tensor.type.name}, which the gguf package cannot undo "
            f"({error}); take another quantization of the model, Q4_K or Q8_0 say"
        ) from error
    return np.require(values.reshape(tensor.shape), dtype=np.float32, requirements=["C", "W"])


def _regroup(file: GGUFFile, tensor: GGUFTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """The tensor's bytes in rows of about VALUES_PER_ROW: blocks stand alone, and short rows are slow."""
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[tensor.type]
    num_blocks = tensor.num_bytes // bytes_per_block
    blocks_per_row = math.gcd(num_blocks, max(1, VALUES_PER_ROW // values_per_block))
    return file.raw(tensor.name).reshape(-1, blocks_per_row * bytes_per_block)


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of a q or k projection (or its bias) back in Hugging Face's order.

    Llama's rotary embedding turns pairs (2i, 2i + 1) in ggml and (i, i + head_dim / 2) in Hugging Face;
    the converter to GGUF reorders the rows of each head accordingly, and this undoes it.
    """
    per_head = tensor.view(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return per_head.transpose(1, 2).reshape(tensor.shape)
