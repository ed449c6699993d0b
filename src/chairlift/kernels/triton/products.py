"""Products with matrices in the formats of `formats.py`, and the tables of embeddings.

Plain matrices are multiplied by torch. A product with few rows is split over its inputs, so that all multiprocessors
work on it. Where its sums are split depends on the matrix alone: with many rows, a program adds the same sums itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Final

import torch
import torch.nn.functional as F

from chairlift.kernels.interface import Prologue, RowKernel
from chairlift.kernels.triton.formats import (
    FORMATS,
    SIGNED,
    SPLIT_PROGRAMS,
    SPLIT_ROWS,
    STEP,
    TILE,
    num_steps,
    num_tiles,
)
from chairlift.kernels.triton.launch import INTERPRETED, PRODUCT_TYPES, Launch, aligned, is_aligned, pointer
from chairlift.kernels.triton.matrices import DeviceMatrix, Matrix, MatrixPart, part_inputs, part_outputs
from chairlift.kernels.triton.product_kernels import gather_rows, merge, multiply

FEW_ROWS: Final = 16
"""The largest number of rows that are one small tile."""

MANY_ROWS: Final = 64
"""The number of rows in a large tile. It is half of it where the registers do not suffice: split sums need a second set
of them, and q6_k has most arrays."""

ONE_SIZE: Final = INTERPRETED or torch.version.hip is not None
"""Whether all tiles have FEW_ROWS, because the order of a sum depends on the number of rows: in the products of numpy,
and in the instructions of AMD's GPUs."""

MIN_SEGMENT_STEPS: Final = 4
MAX_SEGMENTS: Final = 8
MERGED: Final = 1024
"""The number of outputs of a program that adds split sums."""

SCALE_TYPES: Final = {"f8_e4m3": "fp32", "int8": "fp32", "mxfp4": "u8", "q4_k": "i16", "q6_k": "i8", "q4_0": "fp16"}
"""Triton's types of scales; pairs of float16 are "i32"."""

FLOAT: Final = "float"
"""The format of a matrix in the type of the activations."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What decides the code of a product, except the number of rows.

    Attributes:
        format: a key of FORMATS, or FLOAT.
        width, first: the number of outputs of the layer, and the first one of this matrix.
        chosen, is_scattered: see `product_kernels.multiply`.
    """

    format: str
    in_features: int
    out_features: int
    width: int
    first: int
    dtype: torch.dtype
    has_bias: bool = False
    has_residual: bool = False
    chosen: int = 0
    is_scattered: bool = False

    @property
    def num_segments(self) -> int:
        """The number of sums that a result is the sum of: a divisor of the number of steps."""
        count, tiles, steps = 1, num_tiles(self.out_features), num_steps(self.in_features)
        while (
            count < MAX_SEGMENTS
            and tiles * 2 * count <= SPLIT_PROGRAMS
            and steps % (2 * count) == 0
            and steps // (2 * count) >= MIN_SEGMENT_STEPS
        ):
            count *= 2
        return 1 if self.chosen else count


def rows_per_tile(num_rows: int, shape: ProductShape) -> int:
    """The number of rows in a tile, which does not change the results: see `product_kernels`."""
    has_one_size = ONE_SIZE or (shape.dtype == torch.float32 and not INTERPRETED)  # Much code without an instruction.
    if num_rows <= FEW_ROWS or has_one_size:
        return FEW_ROWS
    return MANY_ROWS // 2 if shape.num_segments > 1 or shape.format == "q6_k" else MANY_ROWS


@cache
def product_launch(shape: ProductShape, rows: int, is_split: bool) -> Launch:
    """The launch of `multiply` with `rows` in a tile."""
    kind, x = FORMATS.get(shape.format), pointer(shape.dtype)
    values, scales, blocks = _array_types(shape.format, x)
    constants = {
        **_format_constants(shape.format),
        "IN": shape.in_features,
        "OUT": shape.out_features,
        "WIDTH": shape.width,
        "FIRST": shape.first,
        "ROWS": rows,
        "BLOCK": STEP // 2 if rows > FEW_ROWS or shape.format in ("int8", "u4_g128") else STEP,  # For the registers.
        "SEGMENTS": shape.num_segments,
        "IS_SPLIT": is_split,
        "HAS_BIAS": shape.has_bias and not is_split,
        "HAS_RESIDUAL": shape.has_residual and not is_split,
        "CHOSEN": shape.chosen,
        "IS_SCATTERED": shape.is_scattered,
        "PRODUCT": PRODUCT_TYPES[shape.dtype],
    }
    high = "*u8" if kind is not None and kind.bits == 6 else values
    out = "*fp32" if is_split or shape.is_scattered else x
    order = ("*i32", "*i32") if shape.chosen else (x, x)
    types = (x, values, high, scales, blocks, x, x, out, *order, "i32")
    has_two_sums = shape.num_segments > 1 and not is_split
    stages = 4 if rows == FEW_ROWS and kind is not None else 2 if kind is None and has_two_sums else 3
    return Launch(multiply, constants, types, num_warps=2, num_stages=stages, has_product=True)


def choose_product(shape: ProductShape, num_rows: int) -> tuple[Launch, int, bool]:
    """The launch of a product for a number of rows, the number of rows in a tile, and whether sums are split."""
    rows, is_split = rows_per_tile(num_rows, shape), shape.num_segments > 1 and num_rows <= SPLIT_ROWS
    return product_launch(shape, rows, is_split), rows, is_split


def _array_types(name: str, x: str) -> tuple[str, str, str]:
    """Triton's types of values, scales and scales of 256 inputs. Arrays that a format lacks are those of its values."""
    if name == FLOAT:
        return x, x, x
    values = "*i8" if name in SIGNED else "*u8"
    scales = "*" + ("fp16" if name == "q8_0" else SCALE_TYPES.get(name, "i32"))
    return values, scales, {"q4_k": "*i32", "q6_k": "*fp16"}.get(name, values)


def _format_constants(name: str) -> dict[str, Any]:
    kind = FORMATS.get(name)
    bits, group = (16, 0) if kind is None else (kind.bits, kind.group)
    return {"FORMAT": name, "BITS": bits, "GROUPS": STEP // group if group else 1, "STEP": STEP, "TILE": TILE}


@cache
def merge_launch(count: int, shape: ProductShape, has_factors: bool = False) -> Launch:
    """The launch of `merge` for `count` sums of each result of a product."""
    constants = {
        "COUNT": count,
        "OUT": shape.out_features,
        "WIDTH": shape.width,
        "FIRST": shape.first,
        "BLOCK": MERGED,
        "HAS_FACTORS": has_factors,
        "HAS_BIAS": shape.has_bias,
        "HAS_RESIDUAL": shape.has_residual,
    }
    x = pointer(shape.dtype)
    return Launch(merge, constants, ("*fp32", "*fp32", x, x, x))


@cache
def gather_launch(name: str, in_features: int, dtype: torch.dtype) -> Launch:
    """The launch of `gather_rows`."""
    values, scales, blocks = _array_types(name, "")
    high = "*u8" if FORMATS[name].bits == 6 else values
    constants = {**_format_constants(name), "IN": in_features}
    return Launch(gather_rows, constants, ("*i64", values, high, scales, blocks, pointer(dtype)), num_warps=1)


def kind_of(matrix: MatrixPart) -> str:
    """The format of a matrix: a key of FORMATS, or FLOAT."""
    return matrix.format if isinstance(matrix, DeviceMatrix) else FLOAT


def arrays_of(matrix: MatrixPart) -> tuple[torch.Tensor, ...]:
    """The arguments `values`, `high`, `scales` and `blocks` of kernels."""
    if isinstance(matrix, torch.Tensor):
        return (matrix,) * 4
    values = matrix.values
    arrays = values, matrix.high, matrix.scales, matrix.blocks
    return tuple(values if array is None else array for array in arrays)


class MatrixProduct:
    """The product with one matrix by kernels of this set, which writes some outputs of a layer.

    Args:
        bias: the bias of the whole layer [width], or None.
    """

    def __init__(self, matrix: MatrixPart, bias: torch.Tensor | None, width: int, first: int) -> None:
        self._order = matrix.input_order if isinstance(matrix, DeviceMatrix) else None
        self._bias = None if bias is None else aligned(bias)
        self._arrays = tuple(map(aligned, arrays_of(matrix)))
        shape = ProductShape(
            kind_of(matrix), part_inputs(matrix), part_outputs(matrix), width, first, matrix.dtype, bias is not None
        )
        self._shapes = shape, replace(shape, has_residual=True)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """Write the outputs of the matrix for x [T, in] to `out` [T, width], which may be `residual`."""
        if self._order is not None:
            x = x.index_select(1, self._order)
        shape, num_rows = self._shapes[residual is not None], len(x)
        segments = shape.num_segments
        launch, rows, is_split = choose_product(shape, num_rows)
        sums = x.new_empty((num_rows, segments, shape.out_features), dtype=torch.float32) if is_split else out
        others = x if self._bias is None else self._bias, x if residual is None else residual
        grid = -(-num_rows // rows), num_tiles(shape.out_features)
        launch((*grid, segments if is_split else 1), x, *self._arrays, *others, sums, x, x, num_rows)
        if is_split:
            grid = num_rows, -(-shape.out_features // MERGED)
            merge_launch(segments, shape)(grid, sums, sums, *others, out)


class TritonLinear(ABC):
    """A `LinearKernel` whose prologue and product can be called separately.

    Attributes:
        prologue: the function of rows before the product.
    """

    def __init__(self, prologue: RowKernel) -> None:
        self.prologue = prologue

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.multiply(self.prologue(x), residual, out)

    @abstractmethod
    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        """Compute the layer without its prologue."""


class FloatLinear(TritonLinear):
    """A product with a matrix in the type of activations, by torch.

    Args:
        weight: [out, in].
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, prologue: RowKernel) -> None:
        super().__init__(prologue)
        self._weight, self._bias = weight, bias

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        y = F.linear(x, self._weight, self._bias)
        if out is not None:
            return out.copy_(y)
        return y if residual is None else residual.add_(y)


class PartsLinear(TritonLinear):
    """A product with matrices in several formats.

    Args:
        has_fixed_order: whether kernels of this set also multiply matrices in the type of activations.
    """

    def __init__(
        self, matrix: Matrix, bias: torch.Tensor | None, prologue: RowKernel, has_fixed_order: bool = False
    ) -> None:
        super().__init__(prologue)
        self._width = matrix.out_features
        self._products: list[Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]] = []
        first = 0
        for part in matrix.parts:
            last = first + part_outputs(part)
            if has_fixed_order or isinstance(part, DeviceMatrix):
                self._products.append(MatrixProduct(part, bias, self._width, first))
            else:
                part_bias = None if bias is None else bias[first:last]
                self._products.append(partial(_multiply_floats, part, part_bias, slice(first, last)))
            first = last

    def multiply(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
        x = aligned(x)
        residual = None if residual is None else aligned(residual)
        y = out if residual is None else residual
        if y is None or not is_aligned(y) or y.data_ptr() == x.data_ptr():
            y = x.new_empty((len(x), self._width))
        for product in self._products:
            product(x, residual, y)
        return y if out is None or y is out else out.copy_(y)


def _multiply_floats(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: slice,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    y = F.linear(x, weight, bias)
    out[:, columns] = y if residual is None else residual[:, columns] + y


def make_linear(
    matrix: Matrix,
    bias: torch.Tensor | None,
    prologue: Prologue,
    make_prologue: Callable[[Prologue], RowKernel],
    *,
    has_fixed_order: bool = False,
) -> TritonLinear:
    """Implement `Kernels.make_linear`.

    Args:
        make_prologue: returns the function of rows before the product.
        has_fixed_order: whether the bits of a row are independent of the others also for plain matrices, for which
            those of torch are faster with many rows.
    """
    function, (first, *others) = make_prologue(prologue), matrix.parts
    if has_fixed_order or others or isinstance(first, DeviceMatrix):
        return PartsLinear(matrix, bias, function, has_fixed_order)
    return FloatLinear(first, bias, function)


def make_embedding(matrix: Matrix) -> RowKernel:
    """Implement `Kernels.make_embedding`."""
    (table,) = matrix.parts
    if isinstance(table, torch.Tensor):
        return partial(F.embedding, weight=table)
    assert table.input_order is None, "tables have no order of inputs"
    return partial(_gather, table, arrays_of(table))


def _gather(table: DeviceMatrix, arrays: tuple[torch.Tensor, ...], ids: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(ids), table.in_features), dtype=table.dtype, device=ids.device)
    gather_launch(table.format, table.in_features, table.dtype)(
        (len(ids), num_steps(table.in_features)), aligned(ids), *arrays, out
    )
    return out


TYPICAL: Final = ((4096, 4096), (4096, 28672), (4096, 6144), (14336, 4096))
"""Inputs and outputs of the matrices of Llama-3-8B."""


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches of products of Llama-3-8B, for `python -m benchmarks.gpu_compile`."""
    for name in FORMATS:
        for inputs, outputs in TYPICAL if name == "u4_g128" else TYPICAL[:2]:
            yield from product_variants(name, inputs, outputs, name, torch.bfloat16)
        yield f"{name} embedding", gather_launch(name, 4096, torch.bfloat16)
    yield from product_variants("u4_g128 float16", 4096, 4096, "u4_g128", torch.float16)


def product_variants(
    label: str, inputs: int, outputs: int, name: str, dtype: torch.dtype
) -> Iterator[tuple[str, Launch]]:
    """The launches of a product, with few rows and with many."""
    shape = ProductShape(name, inputs, outputs, outputs, 0, dtype, has_residual=True)
    label = f"{label} {inputs}x{outputs}"
    launches = {id(choose_product(shape, count)[0]): count for count in (SPLIT_ROWS + 1, SPLIT_ROWS, FEW_ROWS)}
    for count in launches.values():
        yield f"{label}, {count} rows", choose_product(shape, count)[0]
    if shape.num_segments > 1:
        yield f"{label}, sum", merge_launch(shape.num_segments, shape)
