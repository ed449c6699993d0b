"""One layer of attention: projections around a backend, and the layer's KV memory."""

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
    """x + attention(prologue(x)), grouped-query and over paged KV memory: [T, hidden_size] -> [T, hidden_size].

    Args:
        backend: its shape says how many heads there are, and how large.
        prefix: of the names of the parameters: q_proj, k_proj, v_proj and `output` follow it.
        prologue: what is done to x first.
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
        """Fresh KV memory; what was there is dropped first."""
        self._kv_cache = None
        self._kv_cache = self._backend.allocate(num_blocks, block_size)

    def __call__(self, x: torch.Tensor, rotary: RotaryStep | None, plan: Any) -> torch.Tensor:
        """The caller gives `x` up: the sum may be computed in its memory."""
        assert self._kv_cache is not None, "allocate_kv_cache comes before forward"
        qkv = self._qkv(x)
        attended = self._backend.forward(qkv, rotary, self._kv_cache, plan, self._sliding_window, self._qk_norm)
        return self._output(attended, residual=x)
