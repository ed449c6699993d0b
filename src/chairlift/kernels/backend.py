"""The interface of attention, and its reference implementation.

Once per step, `plan` prepares everything that does not depend on the layer; each layer then calls `forward` with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from chairlift.kernels import reference
from chairlift.kernels.attention import AttentionMetadata, KVCache, QKNorm

CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The parameters that all attention layers of one backend share.

    Attributes:
        scale: the factor of the dot products.
        dtype: the type of activations.
        kv_cache_dtype: the type of K and V in memory; None for `dtype`. torch.int8 has a scale for each token and head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device
    kv_cache_dtype: torch.dtype | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of K and V in memory."""
        return self.kv_cache_dtype or self.dtype

    @property
    def group_size(self) -> int:
        """The number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim] of a fused tensor
        [T, (num_heads + 2 * num_kv_heads) * head_dim]."""
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        query, key, value = torch.split_with_sizes(qkv.view(len(qkv), -1, self.head_dim), sizes, dim=1)
        return query, key, value


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory.

    On the CPU the system allocates and clears its pages when they are first written. It starts at a cache line, so that
    rows of 64 bytes or more do not share cache lines.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(num_bytes + CACHE_LINE_BYTES, dtype=np.uint8))
    start = -memory.data_ptr() % CACHE_LINE_BYTES
    return memory[start : start + num_bytes].view(dtype).view(size)


def allocate_kv_cache(shape: AttentionShape, num_blocks: int, block_size: int) -> KVCache:
    """KV memory for one layer. It is zeroed, because masked values must still be finite."""
    slots = (num_blocks + 1, shape.num_kv_heads, block_size)
    key, value = (_zeros((*slots, shape.head_dim), shape.kv_dtype, shape.device) for _ in range(2))
    if shape.kv_dtype != torch.int8:
        return KVCache(key, value)
    key_scale, value_scale = (_zeros(slots, torch.float32, shape.device) for _ in range(2))
    return KVCache(key, value, key_scale, value_scale)


class RotaryStep:
    """The rotary embedding at the positions of one step, for all layers.

    Args:
        positions: int64 [T].
        cos_sin_cache: float32 [max_position, head_dim], see `reference.rotate`.
    """

    def __init__(self, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
        self.positions = positions
        self.cos_sin_cache = cos_sin_cache

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, float32 [T, 1, head_dim] each, gathered on first use.

        The cosines are the same in both halves; the sines are negative in the first half and positive in the second.
        """
        cos, sin = self.cos_sin_cache[self.positions][:, None, :].chunk(2, dim=-1)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


class StepContext(NamedTuple):
    """The data of one step that all layers share.

    Attributes:
        positions: int64 [T], the position of each token in its sequence.
        rotations: one for each rotary embedding of the model; each layer has an index into it.
        plans: the result of `AttentionBackend.plan` for each backend of the model; each layer has an index into it.
    """

    positions: torch.Tensor
    rotations: tuple[RotaryStep, ...]
    plans: tuple[Any, ...]


PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """The attention of a kernel set: query/key norm, rotary embedding, KV writes and attention."""

    shape: AttentionShape

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate the KV memory of one layer."""
        ...

    def plan(self, metadata: AttentionMetadata) -> PlanT:
        """Everything that depends on the step but not on the layer."""
        ...

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: PlanT,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
    ) -> torch.Tensor:
        """Normalize and rotate query and key, write K and V into their slots, and compute attention.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], contiguous: query, key and value of each token. It may
                be overwritten.
            rotary: None leaves query and key as they are.
            sliding_window: see `reference.paged_attention`.
            qk_norm: None leaves query and key as they are.

        Returns:
            [T, num_heads * head_dim], valid until the next call of `forward` with any plan.
        """
        ...


class ReferenceAttention:
    """The reference implementation of `AttentionBackend`, which prepares nothing."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        return allocate_kv_cache(self.shape, num_blocks, block_size)

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: AttentionMetadata,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
    ) -> torch.Tensor:
        query, key, value = self.shape.split(qkv)
        if qk_norm is not None:
            query = reference.rms_norm(query, qk_norm.query, qk_norm.eps)
            key = reference.rms_norm(key, qk_norm.key, qk_norm.eps)
        if rotary is not None:
            query = reference.rotate(query, rotary.positions, rotary.cos_sin_cache)
            key = reference.rotate(key, rotary.positions, rotary.cos_sin_cache)
        reference.write_kv(key, value, cache, plan.slot_mapping)
        return reference.paged_attention(query, cache, plan, self.shape.scale, sliding_window).flatten(1)
