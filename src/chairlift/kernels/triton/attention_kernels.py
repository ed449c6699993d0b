"""Paged attention in Triton: one kernel for prompts, chunks and decodes, and one that merges splits of the context.

A program computes a tile of rows, which are query tokens times the query heads of one KV head, so that these heads
share one read of K and V. The keys of a sequence are divided into splits at multiples of SPLIT_KEYS. Each split has a
softmax of its own, and the splits are merged in the order of their keys. A key that a row
does not see changes no bit of the row. So the bits of a row depend neither on the other rows of its tile and batch, nor
on the number of programs that compute its splits.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from chairlift.kernels.triton.attention_sizes import SPLIT_KEYS
from chairlift.kernels.triton.launch import INTERPRETED

TILE_FIELDS: Final = 3
"""The integers of a tile: its sequence, its first row within the rows of the sequence, its first row in the scratch."""

_SPLIT = tl.constexpr(SPLIT_KEYS)
_FIELDS = tl.constexpr(TILE_FIELDS)
_INTERPRETED = tl.constexpr(INTERPRETED)
_LOG2_E = tl.constexpr(1.4426950408889634)
_SUM_COLUMNS = tl.constexpr(16)


@triton.jit
def round_to(x: tl.tensor, TYPE: tl.constexpr) -> tl.tensor:
    """Float32 values in another type, to nearest even; the interpreter would cut bfloat16 off."""
    if _INTERPRETED and tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = bits + 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(TYPE)


@triton.jit
def _find_rows(
    tiles: tl.tensor, starts: tl.tensor, lengths: tl.tensor, window: tl.tensor, GROUP: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """Where the rows of this program's tile are, and which keys they see together."""
    tile = tiles + tl.program_id(0) * _FIELDS
    sequence = tl.load(tile)
    first = tl.load(tile + 1)
    start = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - start
    length = tl.load(lengths + sequence)
    rows = first + tl.arange(0, ROWS)
    before = length - count
    num_rows = tl.minimum(ROWS, count * GROUP - first)
    end = tl.minimum(length, before + (first + ROWS - 1) // GROUP + 1)
    begin = tl.maximum(before + first // GROUP - window + 1, 0)
    scratch_row = tl.load(tile + 2)
    return sequence, start + rows // GROUP, rows % GROUP, before + rows // GROUP, num_rows, begin, end, scratch_row


@triton.jit
def _merge(
    acc: tl.tensor, top: tl.tensor, total: tl.tensor, next_acc: tl.tensor, next_top: tl.tensor, next_total: tl.tensor
) -> tl.tensor:
    """The sums over the keys of two neighboring ranges."""
    higher = tl.maximum(top, next_top)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    decay = tl.exp2(top - base)
    factor = tl.exp2(next_top - base)
    acc = tl.fma(acc, tl.broadcast_to(decay[:, None], acc.shape), next_acc * factor[:, None])
    return acc, higher, tl.fma(total, decay, next_total * factor)


@triton.jit
def _store_rows(
    acc: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    member: tl.tensor,
    num_rows: tl.tensor,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Divide the sums of values by those of weights; a row that sees no key is zero."""
    ROWS: tl.constexpr = acc.shape[0]
    dims = tl.arange(0, acc.shape[1])
    is_row = tl.arange(0, ROWS) < num_rows
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUP + member).to(tl.float32) * _LOG2_E
        higher = tl.maximum(top, sink)
        decay = tl.exp2(top - higher)
        total = tl.fma(total, decay, tl.exp2(sink - higher))
        acc = acc * decay[:, None]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    places = (row.to(tl.int64) * HEADS + head * GROUP + member) * HEAD_DIM
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + places[:, None] + dims[None, :], round_to(result, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_stride", "window"])
def attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    tables: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    SCALE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    PRODUCT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Attention of a tile and KV head; the grid is (tiles, KV heads, programs).

    With IS_SPLIT, each program computes some of the splits and saves their sums for `merge_splits`. Otherwise there is
    one program, which computes and merges all of them.
    """
    sequence, row, member, position, num_rows, begin, end, scratch_row = _find_rows(
        tiles, starts, lengths, window, GROUP, ROWS
    )
    head = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    is_row = tl.arange(0, ROWS) < num_rows
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    places = row.to(tl.int64) * QUERY_STRIDE + (head * GROUP + member) * HEAD_DIM
    q = tl.load(query + places[:, None] + dims[None, :], mask=mask, other=0.0).to(PRODUCT)
    table = tables + sequence.to(tl.int64) * table_stride
    begin = begin // KEYS * KEYS
    # A product with ones is a sum whose order does not depend on the number of rows, as that of tl.sum does.
    ones = tl.full((KEYS, _SUM_COLUMNS), 1.0, PRODUCT)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(begin // _SPLIT + tl.program_id(2), tl.cdiv(end, _SPLIT), tl.num_programs(2)):
        next_acc = tl.zeros((ROWS, WIDTH), tl.float32)
        next_sum = tl.zeros((ROWS, _SUM_COLUMNS), tl.float32)
        next_top = tl.full((ROWS,), -float("inf"), tl.float32)
        stop = tl.minimum(end, split * _SPLIT + _SPLIT)
        for first in range(tl.maximum(begin, split * _SPLIT), stop, KEYS):
            keys = first + tl.arange(0, KEYS)
            is_read = keys < stop
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_read, other=0).to(tl.int64)
            slots = (blocks * KV_HEADS + head) * BLOCK_SIZE + keys % BLOCK_SIZE
            kept = slots[:, None] * HEAD_DIM + dims[None, :]
            is_kept = is_read[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(key + kept, mask=is_kept, other=0)
            if KEYS_ARE_VALUES:
                v = k
            else:
                v = tl.load(value + kept, mask=is_kept, other=0)
            scores = tl.dot(q, tl.trans(k.to(PRODUCT)), input_precision="ieee")
            if HAS_SCALES:
                key_factors = tl.load(key_scale + slots, mask=is_read, other=0.0)
                scores = scores * key_factors[None, :]
            if SOFT_CAP > 0.0:
                scores = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * SCALE / SOFT_CAP * _LOG2_E)) + 1.0)
                scores = scores * (SOFT_CAP * _LOG2_E)
            else:
                scores = scores * (SCALE * _LOG2_E)
            is_seen = (keys[None, :] <= position[:, None]) & (keys[None, :] > position[:, None] - window)
            scores = tl.where(is_seen, scores, -float("inf"))
            higher = tl.maximum(next_top, tl.max(scores, 1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            decay = tl.exp2(next_top - base)
            weights = round_to(tl.exp2(scores - base[:, None]), PRODUCT)
            next_top = higher
            if HAS_SCALES:
                value_factors = tl.load(value_scale + slots, mask=is_read, other=0.0)
                values = round_to(v.to(tl.float32) * value_factors[:, None], PRODUCT)
            else:
                values = v.to(PRODUCT)
            next_sum = tl.dot(weights, ones, next_sum * decay[:, None], input_precision="ieee")
            next_acc = tl.dot(weights, values, next_acc * decay[:, None], input_precision="ieee")
        next_total = tl.max(next_sum, 1)
        if IS_SPLIT:
            rows = (scratch_row + split * num_rows + tl.arange(0, ROWS)) * KV_HEADS + head
            tl.store(partial + rows[:, None] * HEAD_DIM + dims[None, :], next_acc, mask=mask)
            tl.store(sums + rows * 2, next_top, mask=is_row)
            tl.store(sums + rows * 2 + 1, next_total, mask=is_row)
        else:
            acc, top, total = _merge(acc, top, total, next_acc, next_top, next_total)
    if not IS_SPLIT:
        _store_rows(
            acc, top, total, sinks, out, row, head, member, num_rows, GROUP, KV_HEADS * GROUP, HEAD_DIM, HAS_SINKS
        )


@triton.jit(do_not_specialize=["window"])
def merge_splits(
    partial: tl.tensor,
    sums: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    tiles: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """Merge the splits of a tile and KV head in the order of their keys; the grid is (tiles, KV heads)."""
    _, row, member, _, num_rows, begin, end, scratch_row = _find_rows(tiles, starts, lengths, window, GROUP, ROWS)
    head = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    is_row = tl.arange(0, ROWS) < num_rows
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for split in range(begin // KEYS * KEYS // _SPLIT, tl.cdiv(end, _SPLIT)):
        rows = (scratch_row + split * num_rows + tl.arange(0, ROWS)) * KV_HEADS + head
        next_acc = tl.load(partial + rows[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        next_top = tl.load(sums + rows * 2, mask=is_row, other=0.0)
        next_total = tl.load(sums + rows * 2 + 1, mask=is_row, other=0.0)
        acc, top, total = _merge(acc, top, total, next_acc, next_top, next_total)
    _store_rows(acc, top, total, sinks, out, row, head, member, num_rows, GROUP, KV_HEADS * GROUP, HEAD_DIM, HAS_SINKS)
