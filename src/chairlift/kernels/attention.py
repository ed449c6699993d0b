"""Records of attention over paged KV memory: packed queries, block tables and sequence lengths.

One call computes prefills, chunks of prefills and decodes together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class KVCache(NamedTuple):
    """The KV memory of one layer: two tensors [num_blocks + 1, num_kv_heads, block_size, head_dim].

    The layout is the same for all kernel sets. The values of one head in one block are contiguous, so gathering a
    sequence copies pieces of `block_size * head_dim` values and yields [num_kv_heads, seq_len, head_dim] without a
    transpose. The last block belongs to no sequence: no block table contains it, and kernels may write padding there.

    Attributes:
        key, value: float32, float16, bfloat16 or int8.
        key_scale, value_scale: float32 [num_blocks + 1, num_kv_heads, block_size] for int8, else None. A value is the
            int8 times the scale of its token and head.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


class QKNorm(NamedTuple):
    """RMSNorm over each head of query and key before the rotary embedding (Qwen3); both weights are [head_dim]."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of one step: B sequences with T tokens, packed one sequence after the other.

    Sequence i owns query rows `query_start_loc[i]:query_start_loc[i+1]`. They are its last tokens, so its row j is at
    position `seq_lens[i] - query_len + j` and sees keys 0 to position, except those outside a sliding window. Other
    sequences of the step may read the K and V of a sequence with several rows, but not those of a single row.

    Attributes:
        query_start_loc: int32 [B + 1], ascending from 0 to T.
        seq_lens: int32 [B], the number of keys in memory once those of this step are written.
        block_tables: int32 [B, max_blocks]; entries past ceil(seq_len / block_size) are undefined but valid block ids.
        slot_mapping: int64 [T], the slot of each token's K and V, block_id * block_size + offset; -1 writes nothing.
        query_start_loc_host, seq_lens_host: the same as lists of ints, which are read without a device transfer.
        block_size: slots per block.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_host: list[int]
    seq_lens_host: list[int]
    block_size: int
