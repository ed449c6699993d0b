"""DeviceMatrix: a matrix on the device in a format of `formats.py`, and the loader that converts the rows of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from chairlift.errors import ModelLoadError
from chairlift.kernels.triton.formats import (
    FORMATS,
    SIGNED,
    STEP,
    TILE,
    device_format,
    device_parts,
    is_converted,
    num_steps,
    num_tiles,
)
from chairlift.kernels.weight_formats import FLOATS, ORDERED, SUPER_BLOCK
from chairlift.kernels.weights import MatrixParts, PackedRows, Weights

VALUES_AT_ONCE: Final = 1 << 26
"""The number of values that are converted at a time."""

FLOAT_TYPES: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

LARGEST_SCALES: Final = {"f8_e4m3": 128, "mxfp4": 128}
"""The largest scale of a format; of mxfp4 the exponent plus 127."""

BLOCK_BYTES: Final = {
    "u4_g32": 19,
    "u4_g128": 67,
    "u8_g32": 35,
    "q4_0": 18,
    "q4_1": 20,
    "q8_0": 34,
    "mxfp4": 17,
    "q4_k": 144,
    "q6_k": 210,
}
"""Bytes of a block in the rows of a file."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """A matrix [out, in] in a format of `formats.py`.

    Attributes:
        values: uint8, or int8 in the formats of SIGNED: [tiles, steps, TILE, bytes of a step].
        scales: the scales of groups: [tiles, steps, TILE, groups of a step]; one step and group for one per output.
        high: uint8 [tiles, steps, TILE, STEP / 4], the high bits of values of six bits; otherwise None.
        blocks: the scales of 256 inputs: [tiles, steps / 2, TILE, 1]; or None.
        input_order: int64 [in], the input of each value of a row; or None.
        dtype: the type of activations.
    """

    format: str
    out_features: int
    in_features: int
    values: torch.Tensor
    scales: torch.Tensor
    high: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    input_order: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16


MatrixPart = DeviceMatrix | torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Matrices with the same input that are multiplied as one.

    Attributes:
        parts: the matrices in the order of their outputs. A tensor [out, in] is in the type of activations.
    """

    parts: tuple[MatrixPart, ...]

    @property
    def out_features(self) -> int:
        return sum(part_outputs(part) for part in self.parts)


def part_outputs(part: MatrixPart) -> int:
    return part.out_features if isinstance(part, DeviceMatrix) else len(part)


def part_inputs(part: MatrixPart) -> int:
    return part.in_features if isinstance(part, DeviceMatrix) else part.shape[1]


class DeviceMatrixLoader:
    """Loads the matrices of a model."""

    def __init__(self) -> None:
        self._converted: Counter[tuple[str, torch.dtype]] = Counter()

    def load(self, weights: Weights, parts: MatrixParts, in_features: int) -> Matrix:
        """Load matrices with the same input; implements `Kernels.load_matrix`."""
        rows = [weights.packed(f"{name}.weight", (out, in_features)) for name, out in parts]
        formats = [device_format(part.format) for part in rows]
        self._converted.update((part.format, weights.dtype) for part in rows if is_converted(part.format))
        loaded: list[MatrixPart] = []
        for indices in device_parts(formats):
            found = [rows[index] for index in indices]
            if formats[indices[0]] is None:
                tensors = [_floats(part, weights.dtype, weights.device) for part in found]
                loaded.append(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
            else:
                matrix = pack(found, weights.dtype, weights.device)
                _check_scales(matrix, f"{parts[indices[0]][0]}.weight")
                loaded.append(matrix)
        return Matrix(tuple(loaded))

    def notes(self) -> list[str]:
        """Lines to log about matrices that are not in the format of the file."""
        return [
            f"{count} matrices converted from {name} to {str(dtype).removeprefix('torch.')}: the set triton has no "
            "products for their format"
            for (name, dtype), count in sorted(self._converted.items(), key=str)
        ]


def _check_scales(matrix: DeviceMatrix, name: str) -> None:
    """Raise ModelLoadError if products would overflow, because the bias of the exponents is in the factor of scales."""
    largest = LARGEST_SCALES.get(matrix.format)
    if largest is not None and float(matrix.scales.float().abs().max()) > largest:
        raise ModelLoadError(
            f"{name} in {matrix.format} has a scale above {2 if matrix.format == 'mxfp4' else largest}, the largest of "
            "the kernel set triton: use --kernels torch"
        )


def _floats(part: PackedRows, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if part.format in FLOATS:
        whole = part.rows if part.rows.flags.writeable else part.rows.copy()
        return torch.from_numpy(whole).view(FLOAT_TYPES[part.format]).to(device, dtype)
    result = torch.empty((len(part.rows), part.in_features), dtype=dtype, device=device)
    for first, rows in _chunks(part):
        result[first : first + len(rows)] = torch.from_numpy(part.to_floats(rows.numpy())).to(device)
    return result


def _chunks(part: PackedRows) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of a file in parts, each with its first row."""
    count = max(1, VALUES_AT_ONCE // part.in_features)
    for first in range(0, len(part.rows), count):
        yield first, torch.from_numpy(np.array(part.rows[first : first + count]))


def pack(parts: list[PackedRows], dtype: torch.dtype, device: torch.device) -> DeviceMatrix:
    """Convert matrices of the same format to one matrix on the device."""
    name, in_features = parts[0].format.removesuffix(ORDERED), parts[0].in_features
    outputs = sum(len(part.rows) for part in parts)
    arrays: dict[str, torch.Tensor] = {}
    first_row = 0
    for part in parts:
        for first, rows in _chunks(part):
            places = torch.arange(len(rows), device=device) + first_row + first
            for field, values in _arrays(name, rows.to(device), in_features).items():
                if field not in arrays:
                    shape = num_tiles(outputs), values.shape[1], TILE, values.shape[2]
                    arrays[field] = torch.zeros(shape, dtype=values.dtype, device=device)
                arrays[field][places // TILE, :, places % TILE] = values
        first_row += len(part.rows)
    order = parts[0].input_order
    input_order = None if order is None else torch.from_numpy(order.astype(np.int64)).to(device)
    return DeviceMatrix(name, outputs, in_features, input_order=input_order, dtype=dtype, **arrays)


def _arrays(name: str, rows: torch.Tensor, in_features: int) -> dict[str, torch.Tensor]:
    """The arrays of `DeviceMatrix` for rows uint8 [n, bytes], each [n, steps, values of a step]."""
    kind, steps = FORMATS[name], num_steps(in_features)
    numbers, scales, blocks = _decode(name, rows, in_features)
    numbers = torch.nn.functional.pad(numbers, (0, steps * STEP - in_features))
    groups = steps * STEP // kind.group if kind.group else 1
    scales = torch.nn.functional.pad(scales, (0, groups - scales.shape[1]))
    arrays = {"scales": scales.view(len(rows), steps if kind.group else 1, -1)}
    if kind.bits == 8:
        arrays["values"] = numbers.view(len(rows), steps, STEP)
    else:
        low = numbers & 15
        pairs = (low[:, ::2] | low[:, 1::2] << 4).view(len(rows), steps, -1)
        arrays["values"] = pairs.view(torch.int8) if name in SIGNED else pairs
    if kind.bits == 6:
        top = (numbers >> 4).view(len(rows), steps, -1, 4)
        arrays["high"] = top[..., 0] | top[..., 1] << 2 | top[..., 2] << 4 | top[..., 3] << 6
    if blocks is not None:
        count = -(-steps * STEP // SUPER_BLOCK)
        arrays["blocks"] = torch.nn.functional.pad(blocks, (0, count - blocks.shape[1]))[..., None]
    return arrays


def _decode(name: str, rows: torch.Tensor, in_features: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The numbers uint8 (or int8) [n, in], scales [n, groups] and scales of 256 inputs of rows, without their order."""
    if name in ("int8", "f8_e4m3"):
        scales = rows[:, in_features:].contiguous().view(torch.float32)
        return rows[:, :in_features].view(torch.int8), scales, None
    blocks = rows.view(len(rows), -1, BLOCK_BYTES[name])
    if name == "q4_k":
        return _nibbles(blocks[..., 16:], 32), _k_scales(blocks[..., 4:16]), _words(blocks[..., :4])
    if name == "q6_k":
        scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
        return _six_bits(blocks), scales, _halves(blocks[..., 208:])
    if name == "mxfp4":
        return _nibbles(blocks[..., 1:], 16), blocks[..., 0], None
    if name == "q4_0":
        return _nibbles(blocks[..., 2:], 16), _halves(blocks), None
    if name == "q8_0":
        return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks), None
    if name == "q4_1":
        header = torch.stack((_halves(blocks), -_halves(blocks[..., 2:])), -1)
        return _nibbles(blocks[..., 4:], 16), header.view(torch.int32)[..., 0], None
    header = torch.stack((_halves(blocks), blocks[..., 2].half()), -1).view(torch.int32)[..., 0]
    values = blocks[..., 3:]
    return values.flatten(1) if name == "u8_g32" else _nibbles(values, 16), header, None


def _halves(blocks: torch.Tensor) -> torch.Tensor:
    """The float16 at the beginning of each block, [n, blocks, bytes] -> [n, blocks]."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0]


def _words(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., :4].contiguous().view(torch.int32)[..., 0]


def _nibbles(blocks: torch.Tensor, half: int) -> torch.Tensor:
    """Numbers of four bits, [n, blocks, bytes] -> [n, in]. The low bits of `half` bytes precede their high bits."""
    halves = blocks.reshape(*blocks.shape[:2], -1, 1, half)
    return torch.cat((halves & 15, halves >> 4), -2).flatten(1)


def _k_scales(packed: torch.Tensor) -> torch.Tensor:
    """The factors of scales and minimums of Q4_K, six bits each in [n, blocks, 12] -> int16 [n, 8 * blocks]."""
    first, second, last = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, last & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, last >> 4 | second >> 6 << 4), -1)
    return torch.stack((scales, minimums), -1).view(torch.int16).flatten(1)


def _six_bits(blocks: torch.Tensor) -> torch.Tensor:
    """The numbers of Q6_K, [n, blocks, 210] -> [n, in]."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    four = torch.cat((low & 15, low >> 4), -2).flatten(-2)
    two = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2).flatten(-2)
    return (four | two << 4).flatten(1)
