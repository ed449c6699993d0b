"""The seam of attention: what a layer asks for, and the twin's answer.

Once a step, `plan` turns the metadata into whatever the backend can prepare; every layer then calls `forward` with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from chairlift.kernels import reference
from chairlift.kernels.attention import AttentionMetadata


class KVCache(NamedTuple):
    """KV memory of one layer, all backends alike: two tensors [num_blocks + 1, num_kv_heads, block_size, head_dim].

    What one head keeps in one block is contiguous, so gathering a sequence copies whole pieces of
    `block_size * head_dim` values and yields [num_kv_heads, seq_len, head_dim] with no transpose. The last block
    belongs to no sequence: no block table names it, and padding may be written there.
    """

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What all attention layers of a model have in common; `scale` multiplies the dot products."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device

    @property
    def group_size(self) -> int:
        """Query heads that share one kv head."""
        return self.num_heads // self.num_kv_heads


def _zeros(size: tuple[int, ...], shape: AttentionShape) -> torch.Tensor:
    """Zeros; on the CPU in pages that the system hands out (and clears) when they are first written."""
    if shape.device.type != "cpu":
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)
    num_bytes = math.prod(size) * shape.dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(shape.dtype).view(size)


def allocate_kv_cache(shape: AttentionShape, num_blocks: int, block_size: int) -> KVCache:
    """KV memory for one layer, zeroed: what is masked must still be finite."""
    size = (num_blocks + 1, shape.num_kv_heads, block_size, shape.head_dim)
    key, value = (_zeros(size, shape) for _ in range(2))
    return KVCache(key, value)


@dataclass(frozen=True, slots=True)
class RotaryStep:
    """Rotary embedding at the positions of one step, gathered once for all layers.

    Attributes:
        positions: int64 [T].
        cos_sin_cache: float32 [max_position, head_dim], see `reference.rotate`.
        cos: float32 [T, 1, head_dim], each half the cosines.
        signed_sin: float32 [T, 1, head_dim], minus the sines, then the sines.
    """

    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    cos: torch.Tensor
    signed_sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> RotaryStep:
        cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
        return cls(positions, cos_sin_cache, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol[PlanT]):
    """One way to run rotary embedding, KV writes and attention."""

    shape: AttentionShape

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        """KV memory for one layer."""
        ...

    def plan(self, metadata: AttentionMetadata) -> PlanT:
        """All that depends on the step alone and not on the layer."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: PlanT,
        sliding_window: int | None,
    ) -> torch.Tensor:
        """Rotate, write K and V into their slots, attend.

        Args:
            query: [T, num_heads, head_dim].
            key, value: [T, num_kv_heads, head_dim].
            rotary: None leaves query and key as they are.
            sliding_window: see `reference.paged_attention`.

        Returns:
            [T, num_heads, head_dim].
        """
        ...


class ReferenceAttention:
    """The twin: plans nothing."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        return allocate_kv_cache(self.shape, num_blocks, block_size)

    def plan(self, metadata: AttentionMetadata) -> AttentionMetadata:
        return metadata

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: AttentionMetadata,
        sliding_window: int | None,
    ) -> torch.Tensor:
        if rotary is None:
            reference.write_kv(key, value, *cache, plan.slot_mapping)
        else:
            query, _ = reference.rope_and_write_kv(
                query, key, value, rotary.positions, rotary.cos_sin_cache, *cache, plan.slot_mapping
            )
        return reference.paged_attention(query, *cache, plan, self.shape.scale, sliding_window)
