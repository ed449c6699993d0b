"""The interface of parameters that kernels, layers and models load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """A matrix [out, in] in the format of its file.

    Attributes:
        format: the format of the rows: "f32", "f16", "bf16", the name of a block type of ggml in lower case ("q4_1",
            "q6_k"), or another one of `kernels.weight_formats` to which a loader converts exactly.
        rows: uint8 [out, bytes per row], in the order of Hugging Face; read-only.
        in_features: the number of values per row.
        to_floats: rows of this format, uint8 [n, bytes per row] -> float32 [n, in], in the order of the inputs.
        input_order: int32 [in], the input of each value of a row, or None if they are in order. The format of rows with
            an order ends in `weight_formats.ORDERED`.
    """

    format: str
    rows: ByteArray
    in_features: int
    to_floats: Callable[[ByteArray], FloatArray]
    input_order: IntArray | None = None


class Weights(Protocol):
    """A source of named parameters: a safetensors folder, a GGUF file, or random numbers.

    Names follow Hugging Face (`model.layers.0.self_attn.q_proj.weight`), also where the file uses other names.

    Attributes:
        dtype, device: the compute dtype and the compute device.
    """

    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter, in the compute dtype, on the compute device, contiguous.

        Raises:
            ModelLoadError: the parameter is missing, damaged or of another shape; names the file and the key.
        """
        ...

    def packed(self, name: str, shape: tuple[int, int]) -> PackedRows:
        """The matrix in the format of the file, regardless of the compute dtype, in host memory.

        Raises:
            ModelLoadError: the parameter is missing, damaged or of another shape; names the file and the key.
        """
        ...


MatrixParts = Sequence[tuple[str, int]]
"""(name, out_features) of matrices with the same input that are multiplied as one, in the order of their outputs."""


def load_tensor(weights: Weights, parts: MatrixParts, in_features: int) -> torch.Tensor:
    """The `<name>.weight` of all parts, concatenated: [sum of out_features, in], in the compute dtype."""
    tensors = [weights.tensor(f"{name}.weight", (out, in_features)) for name, out in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def packed_tensor(tensor: torch.Tensor) -> PackedRows:
    """A matrix [out, in] of floats on the CPU as `PackedRows`. They share its memory if its type has a format."""
    if tensor.dtype not in _FORMATS:
        tensor = tensor.float()
    tensor = tensor.contiguous()
    name = _FORMATS[tensor.dtype]
    return PackedRows(name, tensor.view(torch.uint8).numpy(), tensor.shape[1], FLOAT_READERS[name])


_FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

FLOAT_READERS: dict[str, Callable[[ByteArray], FloatArray]] = {
    "f32": lambda rows: rows.view(np.float32),
    "f16": lambda rows: rows.view(np.float16).astype(np.float32),
    "bf16": lambda rows: (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
}
"""`PackedRows.to_floats` for the formats of plain values."""
