"""The plain torch twin of every kernel: obvious, slow, the oracle that fast kernels are compared with.

KV memory of one layer is two tensors [num_blocks + 1, num_kv_heads, block_size, head_dim], one of keys and one of
values. Slot s is row `s % block_size` of block `s // block_size`. The last block belongs to no sequence: a kernel may
let padding land there (see `chairlift.kernels.backend.KVCache`).
"""

from __future__ import annotations

import torch

from chairlift.kernels.attention import AttentionMetadata


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [num_rows, size] for int64 ids [T]: [T, size]."""
    return table[token_ids]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out]."""
    y = x @ weight.t()
    return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension, computed in fp32; the result has x's dtype."""
    x32 = x.float()
    normed = x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream moves on and is normed: (rms_norm(x + residual), x + residual)."""
    residual = x + residual
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm (Ba et al., 2016) over the last dimension, computed in fp32; the result has x's dtype."""
    x32 = x.float()
    centered = x32 - x32.mean(-1, keepdim=True)
    normed = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer, 2020) over a fused [T, 2 * size] tensor, gate first: silu(gate) * up, [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al., 2021): dimensions i and i + head_dim/2 are a pair and turn by positions * freq_i.

    Args:
        x: [T, heads, head_dim].
        positions: int64 [T].
        cos_sin_cache: float32 [max_position, head_dim]: the cosines of the head_dim/2 angles, then their sines.
    """
    cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Put key and value [T, num_kv_heads, head_dim] into their slots, int64 [T]; slot -1 writes nothing."""
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, :, slot % block_size] = key[token]
            value_cache[slot // block_size, :, slot % block_size] = value[token]


def rope_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor | None,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [T, num_heads, head_dim] and key [T, num_kv_heads, head_dim] (not if `cos_sin_cache` is None),
    write key and value into their slots, and return the query and the key that attention sees."""
    if cos_sin_cache is not None:
        query, key = rotate(query, positions, cos_sin_cache), rotate(key, positions, cos_sin_cache)
    write_kv(key, value, key_cache, value_cache, slot_mapping)
    return query, key


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Softmax attention of packed queries over keys and values in blocks (Kwon et al., 2023, section 4.1), in fp32.

    Args:
        query: [T, num_heads, head_dim]; head h reads kv head `h // (num_heads // num_kv_heads)`.
        scale: of the dot products.
        sliding_window: a query at position p sees keys p - sliding_window + 1 to p; None: keys 0 to p.

    Returns:
        [T, num_heads, head_dim] in query's dtype. A row that stands before its sequence (padding) sees no key: zeros.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = metadata.query_start_loc_host
    for i, seq_len in enumerate(metadata.seq_lens_host):
        rows = slice(starts[i], starts[i + 1])
        num_blocks = -(-seq_len // metadata.block_size)
        blocks = metadata.block_tables[i, :num_blocks].long()
        keys = _sequence(key_cache, blocks, seq_len)
        values = _sequence(value_cache, blocks, seq_len)
        visible = visible_keys(rows.stop - rows.start, seq_len, sliding_window, query.device)
        out[rows] = _attend(query[rows].float(), keys, values, visible, scale).to(query.dtype)
    return out


def visible_keys(num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Which of keys 0..seq_len-1 each of the last `num_queries` tokens sees: bool [num_queries, seq_len]."""
    positions = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    visible = keys <= positions
    return visible if sliding_window is None else visible & (keys > positions - sliding_window)


def _sequence(cache: torch.Tensor, blocks: torch.Tensor, seq_len: int) -> torch.Tensor:
    """One sequence out of its blocks, in order: float32 [num_kv_heads, seq_len, head_dim]."""
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].float()


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[0]
    scores = torch.einsum("qhd,hkd->hqk", query, keys.repeat_interleave(group, dim=0)) * scale
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1).nan_to_num(0.0)
    return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, dim=0))
