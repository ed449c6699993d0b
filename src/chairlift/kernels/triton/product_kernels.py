"""The kernels of products: x [T, in] times the transposed weights [out, in], which are decoded tile by tile.

A program multiplies a tile of rows by the weights of TILE outputs, step by step, in the order of the inputs. With two
warps, a sum is a chain of the instruction `mma.sync.m16n8k16` on all GPUs of NVIDIA, and which inputs an instruction
multiplies depends on the format alone. So the bits of a row depend neither on the size of a tile nor on other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scales(
    scales: tl.tensor, blocks: tl.tensor, places: tl.tensor, lines: tl.tensor, FORMAT: tl.constexpr
) -> tl.tensor:
    """The factor of each value, and what is subtracted, float32 [outputs, groups].

    Args:
        places: [outputs, groups], the indices of the scales.
        lines: [outputs, 1], the indices of the scales of 256 inputs.
    """
    found = tl.load(scales + places)
    if FORMAT == "mxfp4":
        factor = (found.to(tl.int32) + 126 << 23).to(tl.float32, bitcast=True)
        less = tl.zeros_like(factor)
    elif FORMAT == "f8_e4m3":
        factor = found * 2.0**120
        less = tl.zeros_like(factor)
    elif FORMAT == "q4_k":
        pair = tl.load(blocks + lines)
        factor = _half(pair) * (found & 255).to(tl.float32)
        less = _half(pair >> 16) * ((found >> 8) & 255).to(tl.float32)
    elif FORMAT == "q6_k":
        factor = tl.load(blocks + lines).to(tl.float32) * found.to(tl.float32)
        less = factor * 32.0
    elif FORMAT == "q4_1":
        factor, less = _half(found), _half(found >> 16)
    elif FORMAT == "q4_0":
        factor = found.to(tl.float32)
        less = factor * 8.0
    elif FORMAT == "q8_0" or FORMAT == "int8":
        factor = found.to(tl.float32)
        less = tl.zeros_like(factor)
    else:
        factor = _half(found)
        less = _half(found >> 16) * factor
    return factor, less


@triton.jit
def _numbers(
    values: tl.tensor, high: tl.tensor, lines: tl.tensor, part: tl.tensor, FORMAT: tl.constexpr, BITS: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The values of a part of a step without their scales, float32 [outputs, BLOCK].

    Those of floats of 4 and 8 bits have the exponent of these, whose bias `_scales` corrects.
    """
    if BITS == 8:
        numbers = tl.load(values + lines[:, None] * STEP + (part * BLOCK + tl.arange(0, BLOCK))[None, :])
    else:
        places = part * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        pairs = tl.load(values + lines[:, None] * (STEP // 2) + places[None, :])
        if FORMAT == "mxfp4":
            bits = pairs.to(tl.int32)
            numbers = tl.join(bits << 28 >> 6, bits << 18).reshape(lines.shape[0], BLOCK)
        else:
            numbers = tl.join(pairs & 15, pairs >> 4).reshape(lines.shape[0], BLOCK)
    if BITS == 6:
        places = part * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        four = tl.load(high + lines[:, None] * (STEP // 4) + places[None, :])
        even, odd = tl.join(four & 3, (four >> 4) & 3), tl.join((four >> 2) & 3, four >> 6)
        numbers += tl.join(even, odd).reshape(lines.shape[0], BLOCK) << 4
    if FORMAT == "mxfp4":  # The sign is extended.
        floats = (numbers & -0x7E400000).to(tl.float32, bitcast=True)
    elif FORMAT == "f8_e4m3":
        floats = (numbers.to(tl.int32) << 20 & -0x78100000).to(tl.float32, bitcast=True)
    else:
        floats = numbers.to(tl.float32)
    return floats


@triton.jit
def _weights(
    values: tl.tensor, high: tl.tensor, scales: tl.tensor, blocks: tl.tensor, lines: tl.tensor, scale_lines: tl.tensor,
    block_lines: tl.tensor, part: tl.tensor, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weights of a part of a step, float32 [outputs, BLOCK].

    Args:
        lines, scale_lines, block_lines: [outputs], the index of each output in the step in the arrays of the matrix.
        GROUPS: the number of scales of an output in a step.
    """
    PART_GROUPS: tl.constexpr = 1 if GROUPS == 1 else GROUPS * BLOCK // STEP
    numbers = _numbers(values, high, lines, part, FORMAT, BITS, STEP, BLOCK)
    groups = tl.arange(0, PART_GROUPS) if GROUPS == 1 else part * PART_GROUPS + tl.arange(0, PART_GROUPS)
    places = scale_lines[:, None] * GROUPS + groups[None, :]
    factor, less = _scales(scales, blocks, places, block_lines[:, None], FORMAT)
    grouped = numbers.reshape(lines.shape[0], PART_GROUPS, BLOCK // PART_GROUPS)
    # Products of numbers and scales are exact in float32 where something is subtracted.
    return (grouped * factor[:, :, None] - less[:, :, None]).reshape(lines.shape[0], BLOCK)


@triton.jit
def _multiply_steps(
    x: tl.tensor, is_row: tl.tensor, values: tl.tensor, high: tl.tensor, scales: tl.tensor, blocks: tl.tensor,
    columns: tl.tensor, first: tl.tensor, last: tl.tensor, FORMAT: tl.constexpr, BITS: tl.constexpr,
    GROUPS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, IN: tl.constexpr,
    OUT: tl.constexpr, ROWS: tl.constexpr, PRODUCT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The products of the steps from `first` to `last`, float32 [ROWS, TILE].

    Args:
        x: pointers to the first input of each row, [ROWS, 1].
        values, high, scales, blocks: the arrays of the tile; `values` are those of the matrix if it has no format.
        columns: [TILE], the outputs.
    """
    sums = tl.zeros((ROWS, TILE), tl.float32)
    inputs = tl.arange(0, BLOCK)
    lines = tl.arange(0, TILE)
    PARTS: tl.constexpr = STEP // BLOCK
    for block in range(first * PARTS, last * PARTS):
        places = block * BLOCK + inputs
        is_input = is_row & (places < IN)[None, :]
        rows = tl.load(x + places[None, :], mask=is_row if IN % STEP == 0 else is_input, other=0.0)
        if FORMAT == "float":
            is_weight = (columns < OUT)[:, None] & (places < IN)[None, :]
            tile = tl.load(values + columns.to(tl.int64)[:, None] * IN + places[None, :], mask=is_weight, other=0.0)
        else:
            step = block // PARTS
            at = step * TILE + lines
            scale_lines = lines if FORMAT == "int8" else at
            halved = step // 2 * TILE + lines
            tile = _weights(
                values, high, scales, blocks, at, scale_lines, halved, block % PARTS, FORMAT, BITS, GROUPS, STEP, BLOCK
            )
        sums = tl.dot(rows.to(PRODUCT), tile.to(PRODUCT).T, sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    x: tl.tensor, values: tl.tensor, high: tl.tensor, scales: tl.tensor, blocks: tl.tensor, bias: tl.tensor,
    residual: tl.tensor, out: tl.tensor, tiles: tl.tensor, order: tl.tensor, num_rows: tl.tensor, FORMAT: tl.constexpr,
    BITS: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    CHOSEN: tl.constexpr, IS_SCATTERED: tl.constexpr, PRODUCT: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply a tile of rows by a tile of weights; the grid is (tiles of rows, tiles of outputs, segments or 1).

    Args:
        x: [T, IN].
        values, high, scales, blocks: the arrays of `matrices.DeviceMatrix`; those of all experts if CHOSEN.
        bias: [WIDTH], or [experts, WIDTH].
        residual, out: [T, WIDTH], whose columns from FIRST on are computed; or float32 [T, SEGMENTS, OUT] if IS_SPLIT.
        tiles: int32 [n, 3] if CHOSEN: the expert of a tile of rows, its first row and its last one plus 1 in `order`.
        order: int32 [T * CHOSEN]: the pairs of rows and their chosen experts, sorted by expert.
        SEGMENTS: the number of sums over consecutive inputs that a result is the sum of.
        IS_SPLIT: whether programs write the sums of one segment each, which `merge` adds.
        CHOSEN: the number of experts of a row, or 0. If IS_SCATTERED, x has a row for each place in `order`, and out a
            row for each pair; otherwise x has a row for each token, and out a row for each place.
    """
    STEPS: tl.constexpr = (IN + STEP - 1) // STEP
    COLUMNS: tl.constexpr = (OUT + TILE - 1) // TILE
    BLOCK_STEPS: tl.constexpr = (STEPS + 1) // 2
    SCALE_STEPS: tl.constexpr = 1 if FORMAT == "int8" else STEPS
    column_tile = tl.program_id(1)
    matrix_tile = column_tile.to(tl.int64)
    place = tl.arange(0, ROWS)
    num_steps = STEPS
    if CHOSEN:
        tile = tl.program_id(0) * 3
        expert = tl.load(tiles + tile).to(tl.int64)
        place += tl.load(tiles + tile + 1)
        end = tl.load(tiles + tile + 2)
        num_steps = tl.where(end > tl.load(tiles + tile + 1), STEPS, 0)
        is_row = place < end
        pair = tl.load(order + place, mask=is_row, other=0)
        matrix_tile += expert * COLUMNS
        bias += expert * WIDTH
        if IS_SCATTERED:
            row_in, row_out = place.to(tl.int64), pair.to(tl.int64)
        else:
            row_in, row_out = (pair // CHOSEN).to(tl.int64), place.to(tl.int64)
    else:
        place += tl.program_id(0) * ROWS
        is_row = place < num_rows
        row_in = place.to(tl.int64)
        row_out = row_in
    columns = column_tile * TILE + tl.arange(0, TILE)
    if FORMAT == "float":
        if CHOSEN:
            values += expert * (OUT * IN)
    else:
        values += matrix_tile * (STEPS * TILE * (STEP // 2 if BITS < 8 else STEP))
        high += matrix_tile * (STEPS * TILE * STEP // 4)
        scales += matrix_tile * (SCALE_STEPS * TILE * GROUPS)
        blocks += matrix_tile * (BLOCK_STEPS * TILE)
    x += row_in[:, None] * IN
    SEGMENT: tl.constexpr = STEPS // SEGMENTS
    first, last = 0, num_steps
    if IS_SPLIT:
        first = tl.program_id(2) * SEGMENT
        last = first + SEGMENT
    total = tl.zeros((ROWS, TILE), tl.float32)
    if IS_SPLIT or SEGMENTS == 1:
        total += _multiply_steps(
            x, is_row[:, None], values, high, scales, blocks, columns, first, last,
            FORMAT, BITS, GROUPS, STEP, BLOCK, TILE, IN, OUT, ROWS, PRODUCT,
        )  # fmt: skip
    else:
        for segment in range(SEGMENTS):
            total += _multiply_steps(
                x, is_row[:, None], values, high, scales, blocks, columns, segment * SEGMENT, (segment + 1) * SEGMENT,
                FORMAT, BITS, GROUPS, STEP, BLOCK, TILE, IN, OUT, ROWS, PRODUCT,
            )  # fmt: skip
    is_value = is_row[:, None] & (columns < OUT)[None, :]
    if IS_SPLIT:
        at = (row_out * SEGMENTS + tl.program_id(2))[:, None] * OUT + columns[None, :]
    else:
        at = row_out[:, None] * WIDTH + (FIRST + columns)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + FIRST + columns, mask=columns < OUT, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            total += tl.load(residual + at, mask=is_value, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def merge(
    sums: tl.tensor, factors: tl.tensor, bias: tl.tensor, residual: tl.tensor, out: tl.tensor, COUNT: tl.constexpr,
    OUT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """Add COUNT rows for each row, in their order; the grid is (rows, blocks of outputs).

    Args:
        sums: float32 [T, COUNT, OUT].
        factors: float32 [T, COUNT], or unused.
        bias, residual, out: as in `multiply`.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_value = columns < OUT
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(COUNT):
        part = tl.load(sums + (row * COUNT + index) * OUT + columns, mask=is_value, other=0.0)
        if HAS_FACTORS:
            part *= tl.load(factors + row * COUNT + index)
        total += part
    at = row * WIDTH + FIRST + columns
    if HAS_BIAS:
        total += tl.load(bias + FIRST + columns, mask=is_value, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=is_value, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_value)


@triton.jit
def gather_rows(
    ids: tl.tensor, values: tl.tensor, high: tl.tensor, scales: tl.tensor, blocks: tl.tensor, out: tl.tensor,
    FORMAT: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr,
    IN: tl.constexpr,
) -> None:  # fmt: skip
    """Decode a step of the row of an id, int64 [T], to out [T, IN]; the grid is (T, steps)."""
    STEPS: tl.constexpr = (IN + STEP - 1) // STEP
    row, step = tl.program_id(0), tl.program_id(1)
    found = tl.load(ids + row + tl.arange(0, 1))
    tile, line = found // TILE, found % TILE
    lines = (tile * STEPS + step) * TILE + line
    scale_lines = found if FORMAT == "int8" else lines
    block_lines = (tile * ((STEPS + 1) // 2) + step // 2) * TILE + line
    weights = _weights(
        values, high, scales, blocks, lines, scale_lines, block_lines, 0, FORMAT, BITS, GROUPS, STEP, STEP
    )
    places = step * STEP + tl.arange(0, STEP)[None, :]
    tl.store(out + row.to(tl.int64) * IN + places, weights.to(out.dtype.element_ty), mask=places < IN)
