"""The interface of attention over paged KV memory, shaped like the best kernels: packed queries, block tables,
sequence lengths; prefill, chunk and decode in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class KVCache(NamedTuple):
    """KV memory of one layer, all backends alike: two tensors [num_blocks + 1, num_kv_heads, block_size, head_dim].

    What one head keeps in one block is contiguous, so gathering a sequence copies whole pieces of
    `block_size * head_dim` values and yields [num_kv_heads, seq_len, head_dim] with no transpose. The last block
    belongs to no sequence: no block table names it, and padding may be written there.

    Attributes:
        key, value: float32, float16, bfloat16 or int8.
        key_scale, value_scale: float32 [num_blocks + 1, num_kv_heads, block_size] beside int8, else None: a value is
            its int8 times the scale of its token and head.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


class QKNorm(NamedTuple):
    """RMSNorm over each head of query and key, before the rotation (Qwen3): weights [head_dim] of both."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The shape of one step. B sequences, T tokens packed one sequence after the other.

    Sequence i owns query rows `query_start_loc[i]:query_start_loc[i+1]`; they are its last tokens, so row j of them
    stands at position `seq_lens[i] - query_len + j` and sees keys 0..position (less what a sliding window hides).
    Others of the step may read what a sequence with several rows puts into memory, and none what a single row does.

    Attributes:
        query_start_loc: int32 [B + 1], ascending from 0 to T.
        seq_lens: int32 [B], keys in memory once this step's are written.
        block_tables: int32 [B, max_blocks]; entries past ceil(seq_len / block_size) are undefined but valid block ids.
        slot_mapping: int64 [T], block_id * block_size + offset of each token's K and V; -1 writes nothing.
        query_start_loc_host, seq_lens_host: the same as lists of ints, so that no backend asks the device.
        block_size: slots a block.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_host: list[int]
    seq_lens_host: list[int]
    block_size: int
