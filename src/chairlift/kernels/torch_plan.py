"""The plan of one attention step, computed once for all layers with the same sliding window.

one query row per sequence (decode)  -> sorted by length, in tiles of similar length
a prompt from its first token        -> a chunk without a gather: it sees only K and V of this step
any other chunk                      -> a chunk with a gather and a mask
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from chairlift.kernels.attention import AttentionMetadata, AttentionShape, KVCache
from chairlift.kernels.kernel_memory import TILE_BYTES

TILE_OVERHEAD_BYTES: Final = {"cpu": 1 << 18, "cuda": 1 << 27}
"""The amount of padding that takes about as much time as the calls for one more tile; on CUDA estimated for an H200."""


@dataclass(frozen=True, slots=True)
class KVGather:
    """The pieces of KV memory that one product reads. A piece is K or V of one head in one block.

    Attributes:
        pieces: int64 [batch * num_kv_heads * num_blocks], rows of the cache viewed as [-1, block_size * head_dim].
        shape: (batch, num_kv_heads, num_blocks * block_size, head_dim) of the gathered keys and values.
        key, value: scratch memory that all gathers share.
    """

    pieces: torch.Tensor
    shape: tuple[int, int, int, int]
    key: torch.Tensor
    value: torch.Tensor

    def __call__(self, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy keys and values to scratch memory; the result has `shape` and is valid until the next gather."""
        size = self.key.shape[1]
        torch.index_select(cache.key.view(-1, size), 0, self.pieces, out=self.key)
        if cache.value is cache.key:
            return self.key.view(self.shape), self.key.view(self.shape)
        torch.index_select(cache.value.view(-1, size), 0, self.pieces, out=self.value)
        return self.key.view(self.shape), self.value.view(self.shape)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Rows `start:stop` of the sorted decode rows. `bias` [batch, 1, 1, keys] is 0 for visible keys, else -inf."""

    start: int
    stop: int
    gather: KVGather
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Query rows `start:stop` of one sequence. `bias` [rows, keys] is 0 for visible keys, else -inf.

    Without a gather, attention is causal over K and V of the same rows.
    """

    start: int
    stop: int
    gather: KVGather | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The plan of a step for layers with one sliding window.

    Attributes:
        decode_rows: int64, the query row of each sorted decode row; None if these are rows 0, 1, 2...
    """

    decode_rows: torch.Tensor | None
    tiles: list[DecodeTile]
    chunks: list[PrefillChunk]


@dataclass(slots=True)
class TorchAttentionPlan:
    """The plan of one step.

    Attributes:
        write_rows: int64 [T, num_kv_heads], rows of the cache viewed as [-1, head_dim].
        has_padding_rows: some rows are before the start of their sequence, and see no key.
        windows: the plan for each sliding window, computed on first use.
    """

    metadata: AttentionMetadata
    write_rows: torch.Tensor
    has_padding_rows: bool
    windows: dict[int | None, WindowPlan] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """The query rows of one sequence that see keys, and the columns of its block table that they read."""

    sequence: int
    start: int
    stop: int
    seq_len: int
    first_block: int
    end_block: int

    @property
    def num_queries(self) -> int:
        return self.stop - self.start

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block


class AttentionPlanner:
    """Plans the attention of steps, and owns the scratch memory of gathers, which grows to the largest gather."""

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        self._heads = torch.arange(shape.num_kv_heads, device=shape.device)
        self._scratch = torch.empty((2, 0), dtype=shape.dtype, device=shape.device)
        self._tile_bytes = TILE_BYTES[shape.device.type]
        self._overhead_bytes = TILE_OVERHEAD_BYTES[shape.device.type]

    def plan(self, metadata: AttentionMetadata) -> TorchAttentionPlan:
        starts, seq_lens = metadata.query_start_loc_host, metadata.seq_lens_host
        has_padding = any(starts[i + 1] - starts[i] > seq_len for i, seq_len in enumerate(seq_lens))
        return TorchAttentionPlan(metadata, self._write_rows(metadata), has_padding)

    def plan_window(self, metadata: AttentionMetadata, sliding_window: int | None) -> WindowPlan:
        spans = make_spans(metadata, sliding_window)
        decodes = sorted((span for span in spans if span.num_queries == 1), key=lambda span: -span.num_blocks)
        rows = [span.start for span in decodes]
        return WindowPlan(
            decode_rows=None if rows == list(range(len(rows))) else self._tensor(rows),
            tiles=self._tiles(decodes, metadata, sliding_window),
            chunks=[self._chunk(span, metadata, sliding_window) for span in spans if span.num_queries > 1],
        )

    def _write_rows(self, metadata: AttentionMetadata) -> torch.Tensor:
        """The rows of the cache that K and V are written to.

        Floor division turns slot -1 into the last row of block -1, which is the last block and belongs to no sequence.
        """
        slots, block_size = metadata.slot_mapping[:, None], metadata.block_size
        blocks = torch.div(slots, block_size, rounding_mode="floor")
        return (blocks * self._shape.num_kv_heads + self._heads) * block_size + torch.remainder(slots, block_size)

    def _tiles(
        self, spans: list[QuerySpan], metadata: AttentionMetadata, sliding_window: int | None
    ) -> list[DecodeTile]:
        sequences = self._tensor([span.sequence for span in spans])
        first_blocks = self._tensor([span.first_block for span in spans])
        positions = self._tensor([span.seq_len - 1 for span in spans])
        piece_bytes = metadata.block_size * self._shape.head_dim * self._shape.dtype.itemsize
        block_bytes = 2 * self._shape.num_kv_heads * piece_bytes
        tiles = []
        cuts = cut_tiles([span.num_blocks for span in spans], block_bytes, self._tile_bytes, self._overhead_bytes)
        # A gather keeps the scratch memory that it has when it is planned, so this grows to the largest tile first.
        largest = max(((stop - start) * spans[start].num_blocks for start, stop in cuts), default=0)
        self._scratch_for(largest * self._shape.num_kv_heads, metadata.block_size * self._shape.head_dim)
        for start, stop in cuts:
            part = slice(start, stop)
            gather = self._gather(metadata, sequences[part], first_blocks[part], spans[start].num_blocks)
            first_keys = first_blocks[part] * metadata.block_size
            bias = self._bias(first_keys, gather.shape[2], positions[part, None], sliding_window)
            tiles.append(DecodeTile(start, stop, gather, bias[:, None]))
        return tiles

    def _chunk(self, span: QuerySpan, metadata: AttentionMetadata, sliding_window: int | None) -> PrefillChunk:
        if span.num_queries == span.seq_len and (sliding_window is None or span.seq_len <= sliding_window):
            return PrefillChunk(span.start, span.stop)
        first_block = self._tensor([span.first_block])
        gather = self._gather(metadata, self._tensor([span.sequence]), first_block, span.num_blocks)
        positions = torch.arange(span.seq_len - span.num_queries, span.seq_len, device=self._shape.device)
        bias = self._bias(first_block * metadata.block_size, gather.shape[2], positions[None], sliding_window)
        return PrefillChunk(span.start, span.stop, gather, bias[0])

    def _gather(
        self, metadata: AttentionMetadata, sequences: torch.Tensor, first_blocks: torch.Tensor, num_blocks: int
    ) -> KVGather:
        """The blocks of each sequence from `first_blocks` on; columns past the table repeat its last one, masked."""
        columns = first_blocks[:, None] + torch.arange(num_blocks, device=self._shape.device)
        columns.clamp_(max=metadata.block_tables.shape[1] - 1)
        blocks = metadata.block_tables[sequences[:, None], columns].long()
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        pieces = (blocks[:, None, :] * kv_heads + self._heads[None, :, None]).flatten()
        shape = (len(sequences), kv_heads, num_blocks * metadata.block_size, head_dim)
        key, value = self._scratch_for(len(pieces), metadata.block_size * head_dim)
        return KVGather(pieces, shape, key, value)

    def _scratch_for(self, rows: int, columns: int) -> torch.Tensor:
        size = rows * columns
        if self._scratch.shape[1] < size:
            self._scratch = self._scratch.new_empty((2, size))
        return self._scratch[:, :size].view(2, rows, columns)

    def _bias(
        self, first_keys: torch.Tensor, num_keys: int, positions: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """The mask [batch, queries, num_keys] for `positions` [batch, queries]: 0 for visible keys, else -inf."""
        keys = (first_keys[:, None] + torch.arange(num_keys, device=self._shape.device))[:, None, :]
        hidden = keys > positions[:, :, None]
        if sliding_window is not None:
            hidden |= keys <= positions[:, :, None] - sliding_window
        bias = torch.zeros(hidden.shape, dtype=self._shape.dtype, device=self._shape.device)
        return bias.masked_fill_(hidden, -torch.inf)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._shape.device)


def make_spans(metadata: AttentionMetadata, sliding_window: int | None) -> list[QuerySpan]:
    """The spans of all sequences with query rows that see a key."""
    starts, block_size = metadata.query_start_loc_host, metadata.block_size
    spans = []
    for i, seq_len in enumerate(metadata.seq_lens_host):
        num_queries = min(starts[i + 1] - starts[i], seq_len)
        if num_queries == 0:
            continue
        first_key = 0 if sliding_window is None else max(0, seq_len - num_queries - sliding_window + 1)
        end_block = -(-seq_len // block_size)
        spans.append(
            QuerySpan(i, starts[i + 1] - num_queries, starts[i + 1], seq_len, first_key // block_size, end_block)
        )
    return spans


def cut_tiles(
    num_blocks: Sequence[int], block_bytes: int, tile_bytes: int, overhead_bytes: int
) -> list[tuple[int, int]]:
    """Divide sequences into tiles, each padded to its longest sequence.

    A tile ends where its padding would take more time than another tile, or where it would exceed `tile_bytes`.

    Args:
        num_blocks: the number of blocks of each sequence, descending.
        block_bytes: the bytes of K and V of one block.
        tile_bytes: the maximum size of a tile.
        overhead_bytes: the padding that takes as much time as one more tile.

    Returns:
        Consecutive ranges [start, stop) of sequences.
    """
    tiles: list[tuple[int, int]] = []
    start = padding = 0
    for i, blocks in enumerate(num_blocks):
        longest = num_blocks[start]
        padding += longest - blocks
        too_large = (i + 1 - start) * longest * block_bytes > tile_bytes
        if i > start and (too_large or padding * block_bytes > overhead_bytes):
            tiles.append((start, i))
            start, padding = i, 0
    if num_blocks:
        tiles.append((start, len(num_blocks)))
    return tiles
