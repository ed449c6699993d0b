"""Attention of the set "triton": heads are prepared and K and V written by one kernel, then read by one or two more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import triton

from chairlift.errors import ConfigError
from chairlift.kernels.attention import AttentionBackend, AttentionMetadata, AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.device_copy import to_device
from chairlift.kernels.triton.attention_kernels import TILE_FIELDS, attend, merge_splits
from chairlift.kernels.triton.attention_sizes import MAX_DECODE_TOKENS, MAX_SPLIT_BYTES, SPLIT_KEYS
from chairlift.kernels.triton.heads import prepare_heads
from chairlift.kernels.triton.launch import PRODUCT_TYPES, Launch, aligned, pointer
from chairlift.kernels.triton.typical_shapes import TYPICAL_SHAPES

MAX_HEAD_DIM: Final = 576
DECODE_ROWS: Final = 16
PROMPT_ROWS: Final = 32
"""The rows of a tile of a sequence with few query tokens, and with more.

At most 32, so that both are computed by the same matrix instructions, in the same order of sums: larger tiles have
others on some architectures, and need more registers than there are for the sums of a split and of those before it.
"""

MAX_PROGRAMS: Final = 32
"""The maximum number of programs that compute the splits of a tile in parallel."""

NO_WINDOW: Final = 1 << 30
"""The window of layers without one."""


@dataclass(frozen=True, slots=True)
class TileTable:
    """Tiles of one size, see `attention_kernels`.

    Attributes:
        tiles: int32 [num_tiles, TILE_FIELDS].
        rows: the rows of a tile.
        max_keys: the maximum number of keys of the sequences whose splits are computed in parallel; 0 if none are.
        scratch_rows: the rows of scratch memory that all splits need for each KV head.
    """

    tiles: torch.Tensor
    rows: int
    max_keys: int
    scratch_rows: int


@dataclass(frozen=True, slots=True)
class TritonAttentionPlan:
    """The plan of one step: the sequences, and the tiles of decodes and prompts, if there are any."""

    metadata: AttentionMetadata
    tables: tuple[TileTable, ...]

    def refill(self, plan: TritonAttentionPlan) -> bool:
        """Take the tiles of a plan with as many, whose sequences the captured kernels of this plan compute next.

        Returns:
            Whether the scratch memory suffices for their splits; otherwise the kernels must not run.
        """
        for mine, other in zip(self.tables, plan.tables, strict=True):
            if mine.max_keys > SPLIT_KEYS and other.scratch_rows > mine.scratch_rows:
                return False
            mine.tiles.copy_(other.tiles)
        return True


class TritonAttention(AttentionBackend[TritonAttentionPlan]):
    """Attention whose bits of a token do not depend on the other requests of the step.

    Raises:
        ConfigError: the kernels do not support the size of heads.
    """

    def __init__(self, shape: AttentionShape) -> None:
        if shape.head_dim > MAX_HEAD_DIM:
            raise ConfigError(
                f"head_dim must be at most {MAX_HEAD_DIM} with triton kernels, got {shape.head_dim}: "
                "choose kernels=torch"
            )
        super().__init__(shape)
        self._no_scales = torch.empty(1, dtype=torch.float32, device=shape.device)
        self._max_scratch_rows = MAX_SPLIT_BYTES // (4 * shape.num_kv_heads * (shape.head_dim + 2))

    def plan(self, metadata: AttentionMetadata) -> TritonAttentionPlan:
        counts, lengths = np.diff(metadata.query_start_loc_host), np.array(metadata.seq_lens_host)
        tables = [
            self._make_tiles(metadata, sequences, counts[sequences], lengths[sequences], is_decode)
            for is_decode in (True, False)
            if len(sequences := np.flatnonzero((counts > 0) & ((counts <= MAX_DECODE_TOKENS) == is_decode)))
        ]
        return TritonAttentionPlan(metadata, tuple(tables))

    def _make_tiles(
        self, metadata: AttentionMetadata, sequences: Any, counts: Any, lengths: Any, is_decode: bool
    ) -> TileTable:
        """The tiles of some sequences; those of the last tokens, which see the most keys, come first."""
        rows = DECODE_ROWS if is_decode else prompt_rows(self.shape)
        num_rows = counts * self.shape.group_size
        num_tiles = -(-num_rows // rows)
        owners = np.repeat(np.arange(len(sequences)), num_tiles)
        first = (np.arange(len(owners)) - (np.cumsum(num_tiles) - num_tiles)[owners]) * rows
        scratch = np.cumsum(-(-lengths // SPLIT_KEYS)[owners] * np.minimum(rows, num_rows[owners] - first))
        scratch_rows, max_keys = int(scratch[-1]), int(lengths.max())
        if metadata.is_captured:
            scratch_rows = min(scratch_rows, self._max_scratch_rows)
        if not is_decode or scratch_rows > self._max_scratch_rows:
            max_keys = 0
        tiles = np.stack((sequences[owners], first, np.concatenate(([0], scratch[:-1]))), axis=1)
        assert tiles.shape[1] == TILE_FIELDS
        return TileTable(to_device(tiles[::-1].astype(np.int32), self.shape.device), rows, max_keys, scratch_rows)

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: TritonAttentionPlan,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query = prepare_heads(self.shape, qkv, rotary, cache, plan.metadata, qk_norm)
        out = qkv.new_empty((len(qkv), self.shape.num_heads * self.shape.head_dim))
        for table in plan.tables:
            self._attend(query, cache, plan.metadata, table, sliding_window, sinks, out)
        return out

    def _attend(
        self,
        query: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        table: TileTable,
        sliding_window: int | None,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        shape, has_sinks = self.shape, sinks is not None
        window = NO_WINDOW if sliding_window is None else sliding_window
        num_keys = min(table.max_keys, window + MAX_DECODE_TOKENS + SPLIT_KEYS)
        num_programs = max(1, min(MAX_PROGRAMS, -(-num_keys // SPLIT_KEYS)))
        is_split = num_programs > 1
        scratch_rows = table.scratch_rows * shape.num_kv_heads if is_split else 0
        partial = torch.empty((max(1, scratch_rows), shape.head_dim), dtype=torch.float32, device=shape.device)
        sums = torch.empty((max(1, scratch_rows), 2), dtype=torch.float32, device=shape.device)
        key_scale = self._no_scales if cache.key_scale is None else cache.key_scale
        value_scale = self._no_scales if cache.value_scale is None else cache.value_scale
        sinks = out if sinks is None else aligned(sinks)
        sequences = (metadata.query_start_loc, metadata.seq_lens, table.tiles)
        tiles = (len(table.tiles), shape.num_kv_heads)
        launch = attend_launch(shape, metadata.block_size, query.stride(0), table.rows, has_sinks, is_split)
        launch(
            (*tiles, num_programs),
            query,
            cache.key,
            cache.value,
            key_scale,
            value_scale,
            metadata.block_tables,
            *sequences,
            sinks,
            out,
            partial,
            sums,
            metadata.block_tables.stride(0),
            window,
        )
        if is_split:
            merge = merge_launch(shape, has_sinks)
            merge(tiles, partial, sums, *sequences, sinks, out, window)


def prompt_rows(shape: AttentionShape) -> int:
    """The rows of a tile of prompts; the registers hold fewer rows of wide heads, or of K and V that are converted."""
    return DECODE_ROWS if _width(shape) > 128 or shape.kv_dtype == torch.int8 else PROMPT_ROWS


def _product_type(shape: AttentionShape) -> Any:
    if shape.kv_dtype == torch.int8:
        return PRODUCT_TYPES[shape.dtype]
    return PRODUCT_TYPES[torch.promote_types(shape.dtype, shape.kv_dtype)]


def _width(shape: AttentionShape) -> int:
    return max(16, int(triton.next_power_of_2(shape.head_dim)))


def _num_keys(shape: AttentionShape) -> int:
    """The keys of one iteration, for as much as the registers hold."""
    width, kv_dtype = _width(shape), shape.kv_dtype
    if width > 256 or (width > 128 and kv_dtype == torch.int8):
        return 16
    return 32 if width > 128 or kv_dtype == torch.float32 or (kv_dtype == torch.int8 and width < 128) else 64


def _num_warps(shape: AttentionShape) -> int:
    return 8 if _width(shape) > 256 else 4


@cache
def attend_launch(
    shape: AttentionShape, block_size: int, query_stride: int, rows: int, has_sinks: bool, is_split: bool
) -> Launch:
    """The launch of `attend` for tiles of some size."""
    kv, activations = pointer(shape.kv_dtype), pointer(shape.dtype)
    pointers = (activations, kv, kv, "*fp32", "*fp32", *["*i32"] * 4, activations, activations, "*fp32", "*fp32")
    constants = {
        "SCALE": shape.scale,
        "SOFT_CAP": shape.logits_soft_cap or 0.0,
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group_size,
        "HEAD_DIM": shape.head_dim,
        "BLOCK_SIZE": block_size,
        "QUERY_STRIDE": query_stride,
        "PRODUCT": _product_type(shape),
        "ROWS": rows,
        "KEYS": _num_keys(shape),
        "WIDTH": _width(shape),
        "HAS_SCALES": shape.kv_dtype == torch.int8,
        "HAS_SINKS": has_sinks,
        "KEYS_ARE_VALUES": shape.keys_are_values,
        "IS_SPLIT": is_split,
    }
    num_stages = 2 if shape.kv_dtype == torch.int8 or _width(shape) > 256 else 3
    return Launch(attend, constants, (*pointers, "i32", "i32"), _num_warps(shape), num_stages, has_product=True)


@cache
def merge_launch(shape: AttentionShape, has_sinks: bool) -> Launch:
    """The launch of `merge_splits`."""
    activations = pointer(shape.dtype)
    constants = {
        "KV_HEADS": shape.num_kv_heads,
        "GROUP": shape.group_size,
        "HEAD_DIM": shape.head_dim,
        "ROWS": DECODE_ROWS,
        "KEYS": _num_keys(shape),
        "WIDTH": _width(shape),
        "HAS_SINKS": has_sinks,
    }
    types = ("*fp32", "*fp32", *["*i32"] * 3, activations, activations, "i32")
    return Launch(merge_splits, constants, types, _num_warps(shape))


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches for typical models."""
    for model, shape in TYPICAL_SHAPES.items():
        stride, has_sinks = shape.num_heads * shape.head_dim, model.startswith("gpt-oss")
        for rows in sorted({DECODE_ROWS, prompt_rows(shape)}):
            yield f"attend {rows} rows, {model}", attend_launch(shape, 16, stride, rows, has_sinks, False)
        yield f"attend splits, {model}", attend_launch(shape, 16, stride, DECODE_ROWS, has_sinks, True)
        if shape.kv_dtype == shape.dtype:
            yield f"merge splits, {model}", merge_launch(shape, has_sinks)
