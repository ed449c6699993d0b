"""The attention layer: projections, a call of the attention backend, and the KV memory of the layer."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.kernels.attention import KVCache, QKNorm
from chairlift.kernels.backend import AttentionBackend, RotaryStep
from chairlift.kernels.linear import NO_PROLOGUE, Prologue
from chairlift.kernels.registry import Kernels
from chairlift.kernels.weights import Weights
from chairlift.layers.linear import Linear


class Attention:
    """Grouped-query attention over paged KV memory: x + attention(prologue(x)), [T, hidden_size] -> [T, hidden_size].

    Args:
        backend: the attention backend; its shape gives the number and size of heads.
        prefix: the prefix of the parameter names; q_proj, k_proj, v_proj and `output` follow it.
        prologue: the function of x before the projections.
        output: the name of the output projection.
        qkv_bias, output_bias: whether the projections have a bias.
        qk_norm_eps: the epsilon of RMSNorm over each head of q and k (q_norm, k_norm); None for no norm.
        sliding_window: keys that a query sees, including its own; None for all keys up to its own.
    """

    def __init__(
        self,
        kernels: Kernels,
        backend: AttentionBackend[Any],
        weights: Weights,
        prefix: str,
        *,
        hidden_size: int,
        prologue: Prologue = NO_PROLOGUE,
        output: str = "o_proj",
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        shape = backend.shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        qkv = [(f"{prefix}.q_proj", queries), (f"{prefix}.k_proj", keys), (f"{prefix}.v_proj", keys)]
        self._qkv = Linear(kernels, weights, qkv, hidden_size, bias=qkv_bias, prologue=prologue)
        self._output = Linear(kernels, weights, [(f"{prefix}.{output}", hidden_size)], queries, bias=output_bias)
        self._qk_norm: QKNorm | None = None
        if qk_norm_eps is not None:
            query, key = (weights.tensor(f"{prefix}.{part}_norm.weight", (shape.head_dim,)) for part in "qk")
            self._qk_norm = QKNorm(query, key, qk_norm_eps)
        self._sliding_window = sliding_window
        self._backend = backend
        self._kv_cache: KVCache | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate zeroed KV memory; the earlier memory is freed first."""
        self._kv_cache = None
        self._kv_cache = self._backend.allocate(num_blocks, block_size)

    def __call__(self, x: torch.Tensor, rotary: RotaryStep | None, plan: Any) -> torch.Tensor:
        """Compute the layer. The sum may be computed in the memory of `x`, whose values are lost."""
        assert self._kv_cache is not None, "call allocate_kv_cache first"
        qkv = self._qkv(x)
        attended = self._backend.forward(qkv, rotary, self._kv_cache, plan, self._sliding_window, self._qk_norm)
        return self._output(attended, residual=x)
