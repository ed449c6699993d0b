"""Rows of the formats of native kernels, made from numbers and scales, and decoded to floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from chairlift.kernels.weight_formats import FLOAT_GROUP, ORDERED
from chairlift.kernels.weights import ByteArray, FloatArray, IntArray, PackedRows
from chairlift.models.quantization import NVFP4_GROUP

HALF_GROUP: Final = 16
"""The inputs whose four bits are the low ones of 16 bytes; the next 16 inputs have the high ones."""

SIGN: Final = np.uint8(0x80)
"""The bit in which a signed integer differs from the same integer plus 128."""

MXFP4_INPUTS: Final = 32


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block: a float16 scale, a zero point in a byte or none, and the numbers of `inputs` inputs.

    Without a zero point, numbers of 4 bits are stored as they are, and numbers of 8 bits as signed integers.
    """

    bits: int
    inputs: int
    has_zero_point: bool

    @property
    def header_bytes(self) -> int:
        return 3 if self.has_zero_point else 2

    @property
    def num_bytes(self) -> int:
        return self.header_bytes + self.inputs * self.bits // 8


BLOCK_LAYOUTS: Final = {
    "q4_0": BlockLayout(4, 32, has_zero_point=False),
    "q8_0": BlockLayout(8, 32, has_zero_point=False),
    "u4_g32": BlockLayout(4, 32, has_zero_point=True),
    "u4_g128": BlockLayout(4, 128, has_zero_point=True),
    "u8_g32": BlockLayout(8, 32, has_zero_point=True),
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """A matrix of weights scale * (number - zero point), or scale * float for f8_e4m3, mxfp4 and nvfp4.

    Attributes:
        format: the format of its rows, without ORDERED.
        numbers: uint8 [out, in]; of int8 signed integers plus 128, of floats their bits.
        scales: float32 [out, groups], of equal numbers of inputs (the last group may be shorter).
        zero_points: uint8 [out, groups], or None if all of them are in the middle of the range.
        input_order: see PackedRows; numbers and groups are in this order.
    """

    format: str
    numbers: ByteArray
    scales: FloatArray
    zero_points: ByteArray | None = None
    input_order: IntArray | None = None

    def packed(self) -> PackedRows:
        """Return the rows, with scales rounded to float16 in block types."""
        in_features = self.numbers.shape[1]
        if (layout := BLOCK_LAYOUTS.get(self.format)) is not None:
            rows = _block_rows(self, layout)
        elif self.format == "mxfp4":
            rows = _mxfp4_rows(self.numbers, (np.frexp(self.scales)[1] + EXPONENT_BIAS - 1).astype(np.uint8))
        elif self.format == "nvfp4":
            rows = _append_scales(self.numbers, self.scales)
        elif self.format == "int8":
            rows = _append_scales(self.numbers ^ SIGN, self.scales)
        else:
            rows = _append_scales(self.numbers, _repeat(self.scales, -(-in_features // FLOAT_GROUP)))
        name = self.format if self.input_order is None else self.format + ORDERED
        to_floats = partial(decode_rows, name=self.format, in_features=in_features, input_order=self.input_order)
        return PackedRows(name, rows, in_features, to_floats, self.input_order)

    def scale_error(self) -> float:
        """Return the relative error of the scales in the rows: the ratio of the root mean squares of both."""
        if self.format not in BLOCK_LAYOUTS:
            return 0.0
        with np.errstate(over="ignore"):
            error = self.scales.astype(np.float16).astype(np.float64) - self.scales
        largest = float(np.square(self.scales, dtype=np.float64).sum())
        return math.sqrt(float(np.square(error).sum()) / largest) if largest else 0.0


def _repeat(values: npt.NDArray[Any], num_groups: int) -> npt.NDArray[Any]:
    """Repeat the values of each group, [out, groups], so that there are `num_groups` smaller groups."""
    times = -(-num_groups // values.shape[1])
    return values if times == 1 else np.repeat(values, times, axis=1)[:, :num_groups]


def _append_scales(numbers: ByteArray, scales: npt.NDArray[Any]) -> ByteArray:
    return np.concatenate((numbers, np.ascontiguousarray(scales, np.float32).view(np.uint8)), axis=1)


def _block_rows(matrix: QuantizedMatrix, layout: BlockLayout) -> ByteArray:
    num_rows, in_features = matrix.numbers.shape
    num_blocks = in_features // layout.inputs
    blocks = matrix.numbers.reshape(num_rows, num_blocks, layout.inputs)
    if layout.bits == 4:
        halves = blocks.reshape(num_rows, num_blocks, -1, 2, HALF_GROUP)
        blocks = (halves[..., 0, :] | halves[..., 1, :] << np.uint8(4)).reshape(num_rows, num_blocks, -1)
    elif not layout.has_zero_point:
        blocks = blocks ^ SIGN
    with np.errstate(over="ignore"):  # The loader rejects scales that are out of range.
        scales = _repeat(matrix.scales.astype(np.float16), num_blocks)
    header = [np.ascontiguousarray(scales)[..., None].view(np.uint8)]
    if layout.has_zero_point:
        zeros = matrix.zero_points
        if zeros is None:
            zeros = np.full((num_rows, 1), 1 << (layout.bits - 1), np.uint8)
        header.append(_repeat(zeros, num_blocks)[..., None].astype(np.uint8))
    return np.concatenate((*header, blocks), axis=2).reshape(num_rows, -1)


def decode_rows(rows: ByteArray, name: str, in_features: int, input_order: IntArray | None) -> FloatArray:
    """Return the values of rows of `QuantizedMatrix.packed`, float32 [n, in], in the order of the inputs."""
    if (layout := BLOCK_LAYOUTS.get(name)) is not None:
        values = _decode_blocks(rows, layout)
    elif name == "mxfp4":
        values = decode_mxfp4(rows)
    else:
        scales = rows[:, in_features:].copy().view(np.float32)
        numbers = rows[:, :in_features]
        floats = numbers.view(np.int8).astype(np.float32) if name == "int8" else FLOAT_VALUES[name][numbers]
        values = floats * np.repeat(scales, SCALED_INPUTS.get(name, in_features), axis=1)[:, :in_features]
    if input_order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, input_order] = values
    return ordered


def _decode_blocks(rows: ByteArray, layout: BlockLayout) -> FloatArray:
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, layout.num_bytes)
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    values = blocks[..., layout.header_bytes :]
    if layout.bits == 4:
        pairs = values.reshape(*values.shape[:2], -1, 1, HALF_GROUP)
        values = np.concatenate((pairs & 15, pairs >> 4), axis=3).reshape(*values.shape[:2], -1)
    elif not layout.has_zero_point:
        values = values ^ SIGN
    zeros = blocks[..., 2:3].astype(np.float32) if layout.has_zero_point else np.float32(1 << (layout.bits - 1))
    floats: FloatArray = (values.astype(np.float32) - zeros) * scales
    return floats.reshape(len(rows), -1)


E4M3: Final[FloatArray] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
"""The floats of 8 bits."""


E2M1: Final[FloatArray] = np.outer([1, -1], [0, 0.5, 1, 1.5, 2, 3, 4, 6]).astype(np.float32).ravel()
"""The floats of 4 bits."""

SCALED_INPUTS: Final = {"f8_e4m3": FLOAT_GROUP, "nvfp4": NVFP4_GROUP}
"""The inputs with one scale in formats whose scales follow the numbers."""

FLOAT_VALUES: Final = {"f8_e4m3": E4M3, "nvfp4": E2M1}

EXPONENT_BIAS: Final = 127

NAN_SCALE: Final = 0xFF
"""The scale of MXFP4 that means NaN."""


def decode_mxfp4(rows: ByteArray) -> FloatArray:
    """Return the values of rows in the format "mxfp4", uint8 [n, in / 32 * 17] -> float32 [n, in]."""
    blocks = rows.reshape(len(rows), -1, 1 + MXFP4_INPUTS // 2)
    nibbles = blocks[..., 1:]
    numbers = np.concatenate((nibbles & 15, nibbles >> 4), axis=-1)
    values = E2M1[numbers]
    floats: FloatArray = np.ldexp(values, blocks[..., :1].astype(np.int32) - EXPONENT_BIAS)
    return floats.reshape(len(rows), -1)


def mxfp4_rows(blocks: ByteArray, scales: ByteArray) -> ByteArray:
    """Return rows in the format "mxfp4", with the bits of the tensors of gpt-oss (`_blocks` and `_scales`).

    Args:
        blocks: uint8 [..., out, in / 32, 16]: E2M1 numbers of consecutive inputs, the first in the low bits of a byte.
        scales: uint8 [..., out, in / 32]: the exponents of the scales plus 127.

    Returns:
        uint8 [..., out, in / 32 * 17].
    """
    return _mxfp4_rows(np.stack((blocks & 15, blocks >> 4), axis=-1), scales)


def _mxfp4_rows(numbers: ByteArray, scales: ByteArray) -> ByteArray:
    halves = numbers.reshape(*scales.shape, 2, HALF_GROUP)
    nibbles = halves[..., 0, :] | halves[..., 1, :] << 4
    rows = np.concatenate((scales[..., None], nibbles), axis=-1)
    return rows.reshape(*scales.shape[:-1], scales.shape[-1] * (1 + MXFP4_INPUTS // 2))
