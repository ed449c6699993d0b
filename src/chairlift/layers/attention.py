"""One layer of attention: projections around a backend, and the layer's KV memory."""

from __future__ import annotations

from typing import Any

import torch

from chairlift.kernels.backend import AttentionBackend, KVCache, RotaryStep
from chairlift.kernels.registry import Kernels
from chairlift.layers.linear import Linear
from chairlift.layers.norm import RMSNorm
from chairlift.layers.weights import Weights


class Attention:
    """Grouped-query attention over paged KV memory: [T, hidden_size] -> [T, hidden_size].

    Args:
        backend: its shape says how many heads there are, and how large.
        prefix: of the names of the parameters: q_proj, k_proj, v_proj and `output` follow it.
        qkv_bias, output_bias: whether the projections have one.
        qk_norm_eps: RMSNorm over each head of q and k (q_norm, k_norm); None: none.
        sliding_window: keys that a query sees, itself included; None: all up to itself.
    """

    def __init__(
        self,
        kernels: Kernels,
        backend: AttentionBackend[Any],
        weights: Weights,
        prefix: str,
        *,
        hidden_size: int,
        output: str = "o_proj",
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        sliding_window: int | None = None,
    ) -> None:
        shape = backend.shape
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        parts = [(name, num * shape.head_dim) for name, num in zip(names, heads, strict=True)]
        self._qkv = Linear(kernels, weights, parts, hidden_size, bias=qkv_bias)
        self._output = Linear(
            kernels,
            weights,
            [(f"{prefix}.{output}", hidden_size)],
            shape.num_heads * shape.head_dim,
            bias=output_bias,
        )
        self._qk_norms: list[RMSNorm] = []
        if qk_norm_eps is not None:
            self._qk_norms = [
                RMSNorm(kernels, weights, f"{prefix}.{part}_norm", shape.head_dim, qk_norm_eps) for part in "qk"
            ]
        self._heads = heads
        self._head_dim = shape.head_dim
        self._sliding_window = sliding_window
        self._backend = backend
        self._kv_cache: KVCache | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Fresh KV memory; what was there is dropped first."""
        self._kv_cache = None
        self._kv_cache = self._backend.allocate(num_blocks, block_size)

    def __call__(self, hidden: torch.Tensor, rotary: RotaryStep | None, plan: Any) -> torch.Tensor:
        assert self._kv_cache is not None, "allocate_kv_cache comes before forward"
        num_tokens = hidden.shape[0]
        qkv = self._qkv(hidden).view(num_tokens, -1, self._head_dim)
        query, key, value = torch.split_with_sizes(qkv, self._heads, dim=1)
        if self._qk_norms:
            norm_query, norm_key = self._qk_norms
            query, key = norm_query(query), norm_key(key)
        attended = self._backend.forward(query, key, value, rotary, self._kv_cache, plan, self._sliding_window)
        return self._output(attended.view(num_tokens, -1))
