"""The native kernel set: float32 activations over matrices in the formats of `formats.py`.

Every call writes into memory that is kept: fresh tensors of a step's size cost more in page faults than the products
that fill them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chairlift.kernels import torch_ops
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.attention import NativeAttention
from chairlift.kernels.cpu.formats import common_format
from chairlift.kernels.cpu.native_extension import NativeExtension
from chairlift.kernels.cpu.repacking import Repacked, describe, is_exact, measure, pack
from chairlift.kernels.cpu.row_buffers import RowBuffers
from chairlift.kernels.cpu.tape import RecordedLayers
from chairlift.kernels.linear import LinearKernel, Prologue, RowKernel
from chairlift.kernels.registry import Kernels
from chairlift.kernels.weights import FloatArray, MatrixParts, Weights

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native


def native_kernels(quantization: str | None = None) -> Kernels:
    """The set, with buffers of its own: one for each model.

    Args:
        quantization: the format of all matrices; None: of each, that of its file or the nearest.

    Raises:
        NativeUnavailableError: the extension cannot be loaded.
    """
    native = load()
    loader, buffers = MatrixLoader(native, quantization), RowBuffers()

    def make_embedding(matrix: NativeMatrix) -> RowKernel:
        return NativeEmbedding(matrix, buffers)

    def make_linear(matrix: NativeMatrix, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
        return NativeLinear(native, matrix, bias, prologue, buffers)

    return Kernels(
        name="native",
        load_matrix=loader.load,
        make_embedding=make_embedding,
        make_linear=make_linear,
        make_prologue=torch_ops.make_prologue,
        attention=NativeAttention,
        notes=loader.notes,
        run_layers=RecordedLayers(native, buffers),
    )


@dataclass(frozen=True, slots=True, eq=False)
class NativeMatrix:
    """A packed matrix and what it is for: the name of its first part, without the path to it."""

    packed: _native.PackedMatrix
    purpose: str


class MatrixLoader:
    """Packs matrices part by part, so that none is ever in memory twice as a whole."""

    def __init__(self, native: NativeExtension, quantization: str | None) -> None:
        self._native = native
        self._quantization = quantization
        self._repacked: defaultdict[tuple[str, str], Repacked] = defaultdict(Repacked)

    def load(self, weights: Weights, parts: MatrixParts, in_features: int) -> NativeMatrix:
        """See Kernels.load_matrix."""
        packed = [weights.packed(f"{name}.weight", (out, in_features)) for name, out in parts]
        target = self._quantization or common_format([part.format for part in packed])
        matrix = self._native.PackedMatrix(target, sum(out for _, out in parts), in_features)
        first_row = 0
        for part in packed:
            pack(matrix, first_row, part)
            if not is_exact(part.format, target):
                measure(self._repacked[part.format, target], matrix, first_row, part)
            first_row += len(part.rows)
        return NativeMatrix(matrix, parts[0][0].rpartition(".")[2])

    def notes(self) -> list[str]:
        """What was lost in repacking."""
        return describe(sorted(self._repacked.items()))


class NativeEmbedding:
    """Rows of a matrix by id."""

    def __init__(self, matrix: NativeMatrix, buffers: RowBuffers) -> None:
        self._matrix = matrix.packed
        # A head that shares the matrix reads these rows while it writes its own, which may be as wide.
        self._key = (f"rows of {matrix.purpose}", matrix.packed.in_features)
        self._buffers = buffers

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        assert ids.dtype == torch.int64, "the kernel reads 64-bit ids"
        out = self._buffers.rows(self._key, len(ids))
        self._matrix.gather(ids.contiguous().data_ptr(), len(ids), out.data_ptr())
        return out


class NativeLinear:
    """A `LinearKernel`. A sum with a residual is computed in the residual's memory.

    Attributes:
        num_bytes: of bias and norm, which the extension copies; matrix_bytes: of the matrix.
    """

    def __init__(
        self,
        native: NativeExtension,
        matrix: NativeMatrix,
        bias: torch.Tensor | None,
        prologue: Prologue,
        buffers: RowBuffers,
    ) -> None:
        vectors = [_float_array(vector) for vector in (bias, prologue.weight, prologue.bias)]
        bias_array, norm_weight, norm_bias = vectors
        self._matrix = matrix
        self._kernel = native.Linear(matrix.packed, bias_array, prologue.kind, norm_weight, norm_bias, prologue.eps)
        self._key = (matrix.purpose, matrix.packed.out_features)
        self._buffers = buffers
        self.matrix_bytes = matrix.packed.num_bytes
        self.num_bytes = sum(vector.nbytes for vector in vectors if vector is not None)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        assert x.dtype == torch.float32, "native kernels compute in float32"
        assert x.stride(1) == 1, "a row lies in one piece"
        num_rows = x.shape[0]
        out = self._buffers.rows(self._key, num_rows) if residual is None else residual
        assert out.data_ptr() != x.data_ptr(), "rows are written while others are read"
        self._kernel(x.data_ptr(), x.stride(0), num_rows, out.data_ptr(), out.stride(0), residual is not None)
        return out


def _float_array(vector: torch.Tensor | None) -> FloatArray | None:
    return None if vector is None else vector.float().numpy()
