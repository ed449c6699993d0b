"""The attention layer: projections, a call of the attention backend, and the KV memory of the layer."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.kernels.attention import KVCache, QKNorm
from chairlift.kernels.backend import AttentionBackend, StepContext
from chairlift.layers.linear import Linear


class Attention:
    """output(attention(qkv(x))), grouped-query and over paged KV memory: [T, hidden_size] -> [T, hidden_size].

    Args:
        backend: its shape says how many heads there are, and how large.
        qkv: query, key and value of each token, [T, (num_heads + 2 * num_kv_heads) * head_dim].
        plan: index of the backend's plan in `StepContext.plans`.
        rotation: index of the rotary embedding in `StepContext.rotations`; None: none.
        head_norm: RMSNorm over each head of q and k; None: none.
        sliding_window: keys that a query sees, itself included; None: all up to itself.
    """

    def __init__(
        self,
        backend: AttentionBackend[Any],
        qkv: Linear,
        output: Linear,
        *,
        plan: int = 0,
        rotation: int | None = None,
        head_norm: QKNorm | None = None,
        sliding_window: int | None = None,
    ) -> None:
        self._backend = backend
        self._qkv = qkv
        self._output = output
        self._plan = plan
        self._rotation = rotation
        self._head_norm = head_norm
        self._sliding_window = sliding_window
        self._kv_cache: KVCache | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate zeroed KV memory; the earlier memory is freed first."""
        self._kv_cache = None
        self._kv_cache = self._backend.allocate(num_blocks, block_size)

    def __call__(self, x: torch.Tensor, step: StepContext, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Plus `residual` if there is one, which the caller gives up."""
        assert self._kv_cache is not None, "call allocate_kv_cache first"
        attended = self._backend.forward(
            self._qkv(x),
            None if self._rotation is None else step.rotations[self._rotation],
            self._kv_cache,
            step.plans[self._plan],
            self._sliding_window,
            self._head_norm,
        )
        return self._output(attended, residual)
