"""Paged attention by the native kernels: one call per layer for norm, rotary embedding, KV writes and attention.

The kernels read K and V from KV memory in the order of positions. The output of a token therefore has the same bits for
any batch composition, any division of its prompt into chunks, and any number of threads. Sequences whose block tables
begin with the same blocks compute these keys together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chairlift.errors import ConfigError
from chairlift.kernels.attention import AttentionBackend, AttentionMetadata, AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.cpu import native
from chairlift.kernels.cpu.row_buffers import RowBuffers

if TYPE_CHECKING:
    from chairlift.kernels.cpu import _native

KV_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int8: "int8"}

MAX_HEAD_DIM = 576


@dataclass(frozen=True, slots=True)
class NativeAttentionPlan:
    """The plan of one step.

    Attributes:
        step: the sequences of the step, whose work is divided among threads once for each sliding window.
        num_tokens: T.
        out: float32 [T, num_heads * head_dim], the output of any layer.
        kv_allocations: how often KV memory had been allocated, which changes when its address may change.
    """

    step: _native.AttentionStep
    num_tokens: int
    out: torch.Tensor
    kv_allocations: int


class NativeAttention(AttentionBackend[NativeAttentionPlan]):
    """Attention for float32 activations on the CPU, with float32, bfloat16 or int8 KV memory.

    Raises:
        ConfigError: the kernels do not support the shape or the types.
    """

    def __init__(self, shape: AttentionShape) -> None:
        _check(shape)
        super().__init__(shape)
        self._attention = native.PagedAttention(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            KV_DTYPES[shape.kv_dtype],
            shape.logits_soft_cap or 0.0,
        )
        self._buffers = RowBuffers()
        self._kv_allocations = 0

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        self._kv_allocations += 1
        return super().allocate(num_blocks, block_size)

    def plan(self, metadata: AttentionMetadata) -> NativeAttentionPlan:
        step = native.AttentionStep(
            metadata.query_start_loc.numpy(),
            metadata.seq_lens.numpy(),
            metadata.block_tables.numpy(),
            metadata.slot_mapping.numpy(),
            metadata.block_size,
        )
        num_tokens = len(metadata.slot_mapping)
        width = self.shape.num_heads * self.shape.head_dim
        return NativeAttentionPlan(
            step, num_tokens, self._buffers.rows(("attention", width), num_tokens), self._kv_allocations
        )

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: NativeAttentionPlan,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert qkv.dtype == torch.float32, "native kernels compute in float32"
        assert qkv.is_contiguous(), "tokens must be contiguous"
        assert len(qkv) == plan.num_tokens, "the plan must belong to this step"
        shape = self.shape
        assert sinks is None or (sinks.dtype == torch.float32 and len(sinks) == self.shape.num_heads), "one per head"
        self._attention.forward(
            qkv.data_ptr(),
            plan.step,
            *_norm_arguments(qk_norm),
            (qkv.shape[1] // shape.head_dim - shape.num_heads) // shape.num_kv_heads,
            *_rotary_arguments(rotary),
            cache.key.data_ptr(),
            cache.value.data_ptr(),
            0 if cache.key_scale is None else cache.key_scale.data_ptr(),
            0 if cache.value_scale is None else cache.value_scale.data_ptr(),
            sliding_window or 0,
            0 if sinks is None else sinks.data_ptr(),
            plan.out.data_ptr(),
        )
        return plan.out


def _norm_arguments(norm: QKNorm | None) -> tuple[int, int, float, bool, bool]:
    if norm is None:
        return 0, 0, 0.0, False, False
    key = 0 if norm.key is None else norm.key.data_ptr()
    return norm.query.data_ptr(), key, norm.eps, norm.norms_values, norm.follows_rotation


def _rotary_arguments(rotary: RotaryStep | None) -> tuple[int, int, int, int]:
    if rotary is None:
        return 0, 0, 0, 0
    table, scales = rotary.cos_sin_cache, rotary.query_scales
    return rotary.positions.data_ptr(), table.data_ptr(), table.shape[1], 0 if scales is None else scales.data_ptr()


def _check(shape: AttentionShape) -> None:
    if shape.device.type != "cpu" or shape.dtype != torch.float32:
        raise ConfigError(
            f"native kernels compute in float32 on the CPU, got {shape.dtype} on {shape.device}: choose kernels=torch"
        )
    if shape.kv_dtype not in KV_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in KV_DTYPES)
        raise ConfigError(f"kv_cache_dtype must be one of {known} with native kernels, got {shape.kv_dtype}")
    if shape.head_dim % 4 != 0 or shape.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim must be a multiple of 4 and at most {MAX_HEAD_DIM} with native kernels, got {shape.head_dim}: "
            "choose kernels=torch"
        )
