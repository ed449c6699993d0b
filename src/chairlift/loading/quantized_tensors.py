"""The tensors of quantized linear layers in safetensors files, and their conversion to the formats of the kernels.

| method | tensors |
|---|---|
| awq | qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out] |
| gptq | qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups, out], g_idx [in] |
| compressed-tensors, packed | weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], weight_shape, \
weight_zero_point int32 [out * bits / 32, groups], weight_g_idx [in] |
| compressed-tensors | weight int8 or float8 [out, in], weight_scale [out, groups], weight_zero_point int8 |
| compressed-tensors, nvfp4 | weight_packed uint8 [out, in / 2], weight_scale float8 [out, in / 16], \
weight_global_scale, which divides |
| compressed-tensors, mxfp4 | weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32], the exponents |
| fp8 | weight float8 [out, in], weight_scale_inv [out / 128, in / 128], or weight_scale |

Sources: `WQLinear_GEMM` of AutoAWQ, `TorchQuantLinear` of GPTQModel, the compressors of compressed-tensors, and
`integrations/finegrained_fp8.py` of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.weight_formats import GROUP
from chairlift.kernels.weights import ByteArray, FloatArray, IntArray
from chairlift.loading.block_rows import EXPONENT_BIAS, NAN_SCALE, QuantizedMatrix
from chairlift.models.quantization import MARKERS, WeightScheme

AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of eight outputs in an int32 of AWQ, in steps of four bits."""

NAN_MASK: Final = 0x7F
"""The bits of NaN in E4M3, without the sign."""


class QuantizedReader:
    """Reads the matrix of one linear layer.

    Args:
        read: returns a tensor of the layer by the end of its name, on the CPU; None if there is no such tensor.
        error: makes an error from the end of a tensor's name and a problem.
        shape: (out, in) of the matrix.

    Attributes:
        ignores_zero_points: whether the matrix is symmetric, and the file stores zero points outside the middle.
    """

    def __init__(
        self,
        read: Callable[[str], torch.Tensor | None],
        error: Callable[[str, str], Exception],
        scheme: WeightScheme,
        shape: tuple[int, int],
    ) -> None:
        self._read = read
        self._error = error
        self._scheme = scheme
        self._out, self._in = shape
        self.ignores_zero_points = False

    def matrix(self) -> QuantizedMatrix:
        """Read the matrix in the format `WeightScheme.packed_format`.

        Raises:
            Exception: what `error` returns, if a tensor is missing, has another shape or impossible values.
        """
        if self._scheme.is_float:
            return self._floats() if self._scheme.bits == 8 else self._small_floats()
        self._check_groups()
        if self._scheme.method == "awq":
            matrix = self._awq()
        elif self._scheme.method == "gptq":
            matrix = self._gptq()
        else:
            matrix = self._compressed()
        return replace(matrix, format=self._format, zero_points=self._used_zero_points(matrix.zero_points))

    # -- methods -----------------------------------------------------------------------------------------------------

    def _awq(self) -> QuantizedMatrix:
        groups = self._num_groups
        numbers = _unpack_awq(self._tensor("qweight", (self._in, self._out // 8), torch.int32))
        scales = self._tensor("scales", (groups, self._out))
        zeros = None
        if self._has_zero_points("qzeros"):
            zeros = _unpack_awq(self._tensor("qzeros", (groups, self._out // 8), torch.int32))
        return QuantizedMatrix("", numbers, _floats(scales.T), zeros)

    def _gptq(self) -> QuantizedMatrix:
        bits, groups = self._scheme.bits, self._num_groups
        per_word = 32 // bits
        qweight = self._tensor("qweight", (self._in // per_word, self._out), torch.int32)
        scales = self._tensor("scales", (groups, self._out))
        numbers = unpack_words(np.ascontiguousarray(qweight.T), bits)
        zeros = None
        if self._has_zero_points("qzeros"):
            stored = unpack_words(self._tensor("qzeros", (groups, self._out // per_word), torch.int32), bits)
            zeros = _transposed(stored + np.uint8(self._scheme.zero_point_offset) & np.uint8(2**bits - 1))
        order = self._input_order("g_idx")
        return QuantizedMatrix("", numbers if order is None else numbers[:, order], _floats(scales.T), zeros, order)

    def _compressed(self) -> QuantizedMatrix:
        bits = self._scheme.bits
        if self._read("weight_packed") is not None:
            self._tensor("weight_shape", (2,))
            words = -(-self._in * bits // 32)
            packed = self._tensor("weight_packed", (self._out, words), torch.int32)
            numbers = np.ascontiguousarray(unpack_words(packed, bits)[:, : self._in])
        else:
            numbers = self._unsigned(self._tensor("weight", (self._out, self._in), torch.int8))
        order = self._input_order("weight_g_idx")
        scales = self._row_scales("weight_scale")
        zeros = self._compressed_zero_points() if self._has_zero_points("weight_zero_point") else None
        return QuantizedMatrix("", numbers if order is None else numbers[:, order], scales, zeros, order)

    def _compressed_zero_points(self) -> ByteArray:
        tensor, groups = self._read("weight_zero_point"), self._num_groups
        if tensor is not None and tensor.dtype == torch.int32:
            bits = self._scheme.bits
            words = self._tensor("weight_zero_point", (-(-self._out * bits // 32), groups), torch.int32)
            return _transposed(unpack_words(np.ascontiguousarray(words.T), bits)[:, : self._out])
        if tensor is not None and tensor.numel() == 1:
            return np.full((self._out, 1), self._unsigned(tensor.numpy().reshape(1, 1))[0, 0], np.uint8)
        return self._unsigned(self._tensor("weight_zero_point", (self._out, groups), torch.int8))

    def _unsigned(self, numbers: npt.NDArray[Any]) -> ByteArray:
        return (numbers.astype(np.int8).view(np.uint8) + np.uint8(self._scheme.center)).astype(np.uint8)

    def _floats(self) -> QuantizedMatrix:
        numbers = self._tensor("weight", (self._out, self._in), torch.float8_e4m3fn)
        if (numbers & NAN_MASK == NAN_MASK).any():
            raise self._error("weight", "contains NaN; download the file again")
        size, rows = self._scheme.group_size, self._scheme.block_rows
        name = "weight_scale" if self._read("weight_scale_inv") is None else "weight_scale_inv"
        if size is None:
            scales = self._row_scales(name)
        else:
            shape = (-(-self._out // rows), -(-self._in // size))
            repeated = np.repeat(_floats(self._tensor(name, shape)), rows, axis=0)[: self._out]
            scales = _in_groups(repeated, size, self._in)
        if self._scheme.divides:
            with np.errstate(divide="ignore"):
                scales = self._finite(name, np.reciprocal(scales))
        return QuantizedMatrix("f8_e4m3", numbers, scales)

    def _small_floats(self) -> QuantizedMatrix:
        """Read numbers of 4 bits, the first of two in the low bits of a byte, in NVFP4 or MXFP4."""
        size = self._group_size
        if self._in % size:
            raise self._error("weight_scale", f"has groups of {size} inputs, but the matrix has {self._in} inputs")
        packed = self._tensor("weight_packed", (self._out, self._in // 2), torch.uint8)
        numbers, shape = unpack_words(packed, 4), (self._out, self._num_groups)
        if self._format == "mxfp4":
            exponents = self._tensor("weight_scale", shape, torch.uint8)
            if (exponents == NAN_SCALE).any():
                raise self._error("weight_scale", "contains NaN; download the file again")
            return QuantizedMatrix(
                "mxfp4", numbers, np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS)
            )
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = self._tensor("weight_scale", shape) / self._row_scales("weight_global_scale")[:, :1]
        return QuantizedMatrix("nvfp4", numbers, self._finite("weight_global_scale", _floats(scales)))

    # -- parts -------------------------------------------------------------------------------------------------------

    @property
    def _format(self) -> str:
        return replace(self._scheme, act_order=False).packed_format(self._in)

    @property
    def _group_size(self) -> int:
        return self._scheme.group_size or self._in

    @property
    def _num_groups(self) -> int:
        return -(-self._in // self._group_size)

    def _check_groups(self) -> None:
        if self._format != "int8" and (self._in % self._group_size or self._in % GROUP):
            raise self._error(
                MARKERS[0] if self._scheme.method in ("awq", "gptq") else "weight_scale",
                f"has groups of {self._group_size} inputs, but the matrix has {self._in} inputs; supported: multiples "
                f"of the group size and of {GROUP}",
            )

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> npt.NDArray[Any]:
        """Read a tensor, which must have the shape and type; None for the type accepts all."""
        tensor = self._read(name)
        if tensor is None:
            raise self._error(name, "is missing; the file is incomplete or does not match its configuration")
        if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
            expected = f"{dtype} " if dtype is not None else ""
            raise self._error(
                name,
                f"is {tensor.dtype} {tuple(tensor.shape)}, but the configuration requires {expected}{shape} "
                f"({self._scheme.method} with {self._scheme.bits} bits, group_size {self._scheme.group_size})",
            )
        if tensor.dtype.is_floating_point and dtype is None:
            return self._finite(name, tensor.float().numpy())
        return tensor.contiguous().view(torch.uint8 if dtype == torch.float8_e4m3fn else tensor.dtype).numpy()

    def _finite(self, name: str, values: FloatArray) -> FloatArray:
        if not np.isfinite(values).all():
            raise self._error(name, "contains infinite numbers or NaN; download the file again")
        return values

    def _row_scales(self, name: str) -> FloatArray:
        """Read scales of groups, or one scale for all outputs."""
        tensor = self._read(name)
        if tensor is not None and tensor.numel() == 1:
            value = self._finite(name, tensor.float().numpy().reshape(1, 1))
            return np.repeat(np.repeat(value, self._out, axis=0), self._num_groups, axis=1)
        if tensor is not None and tensor.ndim == 1 and self._num_groups == 1:
            return _floats(self._tensor(name, (self._out,))).reshape(-1, 1)
        return _floats(self._tensor(name, (self._out, self._num_groups)))

    def _has_zero_points(self, name: str) -> bool:
        """Whether to read zero points, which files with a symmetric scheme need not have."""
        return not self._scheme.symmetric or self._read(name) is not None

    def _used_zero_points(self, zeros: ByteArray | None) -> ByteArray | None:
        """Return None if the scheme is symmetric, which means the middle, whatever the file stores."""
        if zeros is None or not self._scheme.symmetric:
            return zeros
        self.ignores_zero_points = bool((zeros != self._scheme.center).any())
        return None

    def _input_order(self, name: str) -> IntArray | None:
        """Return the inputs sorted by group, or None if the scheme does not permit another order than the file's."""
        groups = self._read(name)
        if groups is None:
            if self._scheme.act_order:
                raise self._error(name, "is missing, but the configuration says that inputs have an order of their own")
            return None
        indices = self._tensor(name, (self._in,)).astype(np.int64)
        expected = np.arange(self._in) // self._group_size
        if not self._scheme.act_order:
            if (indices != expected).any():
                raise self._error(
                    name, "reorders the inputs, but the configuration says otherwise; set desc_act to true"
                )
            return None
        order = np.argsort(indices, kind="stable")
        if not np.array_equal(indices[order], expected):
            raise self._error(name, f"must assign {self._group_size} inputs to each of {self._num_groups} groups")
        return order.astype(np.int32)


def unpack_words(words: npt.NDArray[Any], bits: int) -> ByteArray:
    """Return the unsigned numbers of int32 words, the lowest bits first: [n, words] -> uint8 [n, words * 32 / bits]."""
    numbers = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return numbers
    return np.stack((numbers & 15, numbers >> 4), axis=-1).reshape(len(numbers), -1)


def _unpack_awq(words: npt.NDArray[Any]) -> ByteArray:
    """Return the numbers of int32 words of AWQ: [n, out / 8] -> uint8 [out, n]."""
    return _transposed(unpack_words(words, 4).reshape(len(words), -1, 8)[..., AWQ_ORDER].reshape(len(words), -1))


def _transposed(numbers: npt.NDArray[np.uint8]) -> ByteArray:
    return np.ascontiguousarray(numbers.T)


def _floats(values: npt.NDArray[Any]) -> FloatArray:
    return np.ascontiguousarray(values, np.float32)


def _in_groups(scales: FloatArray, size: int, in_features: int) -> FloatArray:
    """Repeat scales of groups of `size` inputs, a multiple of 128, for each 128 inputs."""
    repeated: FloatArray = np.repeat(scales, size // 128, axis=1)[:, : -(-in_features // 128)]
    return repeated
