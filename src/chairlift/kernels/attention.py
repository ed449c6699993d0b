"""The interface of attention over paged KV memory: its records, and the backend that a kernel set implements.

Once per step, `AttentionBackend.plan` prepares everything that does not depend on the layer; each layer then calls
`forward` with it. One call computes prefills, chunks of prefills and decodes together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from chairlift.kernels.kernel_memory import SPARE_BLOCKS
from chairlift.kernels.recurrence import StateStep

CACHE_LINE_BYTES = 64


class KVCache(NamedTuple):
    """The KV memory of one layer: two tensors [num_blocks + 1, num_kv_heads, block_size, head_dim].

    The layout is the same for all kernel sets. The values of one head in one block are contiguous, so gathering a
    sequence copies pieces of `block_size * head_dim` values and yields [num_kv_heads, seq_len, head_dim] without a
    transpose. The last block belongs to no sequence: no block table contains it, and kernels may write padding there.

    Attributes:
        key, value: float32, float16, bfloat16 or int8. Both are one tensor where the keys are the values.
        key_scale, value_scale: float32 [num_blocks + 1, num_kv_heads, block_size] for int8, else None. A value is the
            int8 times the scale of its token and head.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


class QKNorm(NamedTuple):
    """RMSNorm over each head of query and key (Qwen3); both weights are [head_dim].

    Attributes:
        key: None in a layer that does not compute keys.
        norms_values: whether the heads of V have an RMSNorm too, without a weight (Gemma 4).
        follows_rotation: whether the norm comes after the rotary embedding instead of before it (HunYuan).
    """

    query: torch.Tensor
    key: torch.Tensor | None
    eps: float
    norms_values: bool = False
    follows_rotation: bool = False


class ProjectedHeads(NamedTuple):
    """Query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim] of the tokens of a step.

    Attributes:
        key, value: None in a layer that reads K and V of another layer. Without a projection of the value, both are the
            same memory.
    """

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The sequences of one step: B sequences with T tokens, packed one sequence after the other.

    Sequence i owns query rows `query_start_loc[i]:query_start_loc[i+1]`. They are its last tokens, so its row j is at
    position `seq_lens[i] - query_len + j` and sees keys 0 to position, except those outside a sliding window. Other
    sequences of the step may read the K and V of a sequence with several rows, but not of one with a single row.

    Attributes:
        query_start_loc: int32 [B + 1], ascending from 0 to T.
        seq_lens: int32 [B], the number of keys in memory once the keys of this step are written.
        block_tables: int32 [B, max_blocks]; entries past ceil(seq_len / block_size) are undefined but valid block ids.
        slot_mapping: int64 [T], the slot of each token's K and V, block_id * block_size + offset; -1 writes nothing.
        query_start_loc_host, seq_lens_host: the same as lists of ints, which are read without a device transfer.
        block_size: slots per block.
        is_captured: whether the plan belongs to a CUDA graph, whose sequences have other lengths in each replay;
            `seq_lens_host` are the largest ones.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_host: list[int]
    seq_lens_host: list[int]
    block_size: int
    is_captured: bool = False


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that all attention layers of one backend share.

    Attributes:
        scale: the factor of the dot products.
        dtype: the type of activations.
        logits_soft_cap: c, where a score s becomes c * tanh(s / c) before the softmax (Gemma 2), or None.
        kv_cache_dtype: the type of K and V in memory; None for `dtype`. torch.int8 has a scale for each token and head.
        keys_are_values: whether the values are the keys after their norm and rotation, which are kept once.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    kv_cache_dtype: torch.dtype | None = None
    logits_soft_cap: float | None = None
    keys_are_values: bool = False

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of K and V in memory."""
        return self.kv_cache_dtype or self.dtype

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def split(self, qkv: torch.Tensor) -> ProjectedHeads:
        """Views of query, key and value in the fused tensor that is the argument of `AttentionBackend.forward`."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        query = heads[:, : self.num_heads]
        if heads.shape[1] == self.num_heads:
            return ProjectedHeads(query, None, None)
        return ProjectedHeads(query, heads[:, self.num_heads :][:, : self.num_kv_heads], heads[:, -self.num_kv_heads :])


def zeroed(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory.

    On the CPU the system allocates and clears its pages when they are first written. It starts at a cache line, so that
    rows of 64 bytes or more do not share cache lines.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE_BYTES, dtype=np.uint8))
    start = -memory.data_ptr() % CACHE_LINE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(size)


class RotaryStep:
    """The rotary embedding (Su et al., 2021) at the positions of one step, for all layers.

    Of the first n dimensions of a head, i and i + n/2 are a pair, which is rotated by position * frequency i.

    Args:
        positions: int64 [T].
        cos_sin_cache: float32 [max_position, n], the cosines of the n/2 angles, then their sines.
        query_scales: float32 [max_position], the factor of the query at each position, or None for no factors.
    """

    def __init__(
        self, positions: torch.Tensor, cos_sin_cache: torch.Tensor, query_scales: torch.Tensor | None = None
    ) -> None:
        self.positions = positions
        self.cos_sin_cache = cos_sin_cache
        self.query_scales = query_scales

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, float32 [T, 1, rotated dimensions] each, gathered on first use.

        The cosines are the same in both halves; the sines are negative in the first half and positive in the second.
        """
        cos, sin = self.cos_sin_cache[self.positions][:, None, :].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def scale_queries(self, query: torch.Tensor) -> torch.Tensor:
        """Multiply the queries [T, num_heads, head_dim] by the factors of their positions, in their memory."""
        if self.query_scales is None:
            return query
        return query.mul_(self.query_scales[self.positions][:, None, None])


class StepContext(NamedTuple):
    """The data of one step that all layers share.

    Attributes:
        positions: int64 [T], the position of each token in its sequence.
        rotations: one for each rotary embedding of the model; each layer has an index into it.
        plans: the result of `AttentionBackend.plan` for each backend and each group of layers with block tables of its
            own; each layer has an index into it.
        per_layer_inputs: [T, num_layers + 1, size], the inputs of each token for each layer after one unused input, for
            models that have them. A layer overwrites the input before its own.
        states: the recurrent states that the step reads and writes, for models that have them.
    """

    positions: torch.Tensor
    rotations: tuple[RotaryStep, ...]
    plans: tuple[Any, ...]
    per_layer_inputs: torch.Tensor | None = None
    states: StateStep | None = None


PlanT = TypeVar("PlanT")


class AttentionBackend(ABC, Generic[PlanT]):
    """The attention of a kernel set: norms of heads, rotary embedding, KV writes and attention."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate the KV memory of one layer. It is zeroed, because masked values must still be finite."""
        shape = self.shape
        slots = (num_blocks + SPARE_BLOCKS, shape.num_kv_heads, block_size)
        count = 1 if shape.keys_are_values else 2
        memories = [zeroed((*slots, shape.head_dim), shape.kv_dtype, shape.device) for _ in range(count)]
        if shape.kv_dtype != torch.int8:
            return KVCache(memories[0], memories[-1])
        scales = [zeroed(slots, torch.float32, shape.device) for _ in range(count)]
        return KVCache(memories[0], memories[-1], scales[0], scales[-1])

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> PlanT:
        """Everything that depends on the step but not on the layer."""

    @abstractmethod
    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: PlanT,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalize and rotate query and key, write K and V into their slots, and compute attention (Kwon et al., 2023,
        section 4.1). Head h of the query reads KV head h // `group_size`.

        Args:
            qkv: [T, heads * head_dim], contiguous, which may be overwritten: the heads of query, key and value of each
                token. Without heads of values, the projected keys are the values as well; with `keys_are_values` after
                their norm and rotation. With heads of the query only, `cache` contains K and V of this step already,
                and remains as it is.
            rotary: None leaves query and key as they are.
            sliding_window: a query at position p sees keys p - sliding_window + 1 to p; None for keys 0 to p.
            qk_norm: None leaves query, key and value as they are.
            sinks: [num_heads], a score of each head that is part of its softmax, but has no value (gpt-oss; after Xiao
                et al., 2023), or None.

        Returns:
            [T, num_heads * head_dim], valid until the next call of `forward` with any plan.
        """
