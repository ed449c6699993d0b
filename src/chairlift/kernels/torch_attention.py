"""Paged attention in torch, on every device: gather, then scaled dot product attention.

Query heads that share a KV head are rows of one product, so keys and values are not copied for each query head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from chairlift.errors import ConfigError
from chairlift.kernels.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    KVCache,
    QKNorm,
    RotaryStep,
)
from chairlift.kernels.torch_ops import norm_and_rotate, rms_norm
from chairlift.kernels.torch_plan import AttentionPlanner, PrefillChunk, TorchAttentionPlan, WindowPlan


class TorchAttention(AttentionBackend[TorchAttentionPlan]):
    """Attention with loops over tiles and prompts, but not over tokens.

    Raises:
        ConfigError: the type of K and V in memory differs from the type of activations.
    """

    def __init__(self, shape: AttentionShape) -> None:
        if shape.kv_dtype != shape.dtype:
            kept, computed = (str(dtype).removeprefix("torch.") for dtype in (shape.kv_dtype, shape.dtype))
            raise ConfigError(
                f"kv_cache_dtype must be {computed} with torch kernels, like the activations, got {kept}: leave it "
                f"out, set dtype={kept}, or choose another kernel set with kernels"
            )
        super().__init__(shape)
        self._planner = AttentionPlanner(shape)

    def plan(self, metadata: AttentionMetadata) -> TorchAttentionPlan:
        return self._planner.plan(metadata)

    def forward(
        self,
        qkv: torch.Tensor,
        rotary: RotaryStep | None,
        cache: KVCache,
        plan: TorchAttentionPlan,
        sliding_window: int | None,
        qk_norm: QKNorm | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = self.shape.split(qkv)
        query = norm_and_rotate(query, qk_norm and qk_norm.query, qk_norm, rotary)
        if rotary is not None:
            query = rotary.scale_queries(query)
        key_rows, value_rows = (memory.view(-1, self.shape.head_dim) for memory in (cache.key, cache.value))
        if key is None or value is None:  # An earlier layer has written them in this step.
            key, value = key_rows[plan.write_rows], value_rows[plan.write_rows]
        else:
            key = norm_and_rotate(key, qk_norm and qk_norm.key, qk_norm, rotary)
            if qk_norm is not None and qk_norm.norms_values:
                value = rms_norm(value, value.new_ones(value.shape[-1]), qk_norm.eps)
            key_rows.index_put_((plan.write_rows,), key)
            if self.shape.keys_are_values:
                value = key
            else:
                value_rows.index_put_((plan.write_rows,), value)
        window = plan.windows.get(sliding_window)
        if window is None:
            window = plan.windows[sliding_window] = self._planner.plan_window(plan.metadata, sliding_window)
        make = torch.zeros if plan.has_padding_rows else torch.empty
        out = make(query.shape, dtype=query.dtype, device=query.device)
        if window.tiles:
            self._decode(query, cache, window, sinks, out)
        for chunk in window.chunks:
            self._prefill(query, key, value, cache, chunk, sinks, out)
        return out.flatten(1)

    def _decode(
        self, query: torch.Tensor, cache: KVCache, window: WindowPlan, sinks: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        rows = window.decode_rows
        tile_query = query if rows is None else query.index_select(0, rows)
        tile_out = out if rows is None else torch.empty_like(tile_query)
        for tile in window.tiles:
            batch, kv_heads, _, head_dim = tile.gather.shape
            grouped = (batch, kv_heads, self.shape.group_size, head_dim)
            keys, values = tile.gather(cache)
            part = tile_query[tile.start : tile.stop].reshape(grouped)
            attended = self._attend(part, keys, values, tile.bias, sinks, (kv_heads, -1, 1))
            tile_out[tile.start : tile.stop].view(grouped).copy_(attended)
        if rows is not None:
            out.index_copy_(0, rows, tile_out)

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        chunk: PrefillChunk,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        shape, rows = self.shape, slice(chunk.start, chunk.stop)
        if chunk.gather is None:
            keys, values = key[rows].transpose(0, 1), value[rows].transpose(0, 1)
        else:
            keys, values = (gathered[0] for gathered in chunk.gather(cache))
        grouped = (chunk.stop - chunk.start, shape.num_kv_heads, shape.group_size, shape.head_dim)
        attended = self._attend(
            query[rows].reshape(grouped).permute(1, 2, 0, 3),
            keys[:, None].expand(-1, shape.group_size, -1, -1),
            values[:, None].expand(-1, shape.group_size, -1, -1),
            chunk.bias,
            sinks,
            (shape.num_kv_heads, -1, 1, 1),
        )
        out[rows].view(grouped).copy_(attended.permute(2, 0, 1, 3))

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        sinks_shape: tuple[int, ...],
    ) -> torch.Tensor:
        """Attention with a mask of 0 and -inf, or causal without one; torch has no kernel with a soft cap or sinks.

        Args:
            sinks_shape: the shape of `sinks` that broadcasts with the scores [..., rows, keys].
        """
        scale, cap = self.shape.scale, self.shape.logits_soft_cap
        if cap is None and sinks is None:
            return F.scaled_dot_product_attention(query, keys, values, bias, is_causal=bias is None, scale=scale)
        scores = (query.float() @ keys.float().transpose(-1, -2)).mul_(scale)
        if cap is not None:
            scores.div_(cap).tanh_().mul_(cap)
        if bias is None:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
            scores.masked_fill_(hidden, -torch.inf)
        else:
            scores.add_(bias)
        if sinks is not None:
            sink = sinks.float().view(sinks_shape).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[-2]]
        return weights.to(values.dtype) @ values
