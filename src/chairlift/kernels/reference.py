"""The plain torch twin of every kernel: obvious, slow, the oracle that fast kernels are compared with.

KV memory of one layer is two tensors [num_blocks + 1, num_kv_heads, block_size, head_dim], one of keys and one of
values. Slot s is row `s % block_size` of block `s // block_size`. The last block belongs to no sequence: a kernel may
let padding land there (see `chairlift.kernels.attention.KVCache`).
"""

from __future__ import annotations

from typing import Final

import torch

from chairlift.kernels.activations import find_activation
from chairlift.kernels.attention import AttentionMetadata, KVCache
from chairlift.kernels.linear import NORM_KINDS, NativePrologueKind, Prologue


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of `table` [num_rows, size] for int64 ids [T]: [T, size]."""
    return table[token_ids]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] times weight [out, in] transposed, plus bias [out]: [T, out]."""
    y = x @ weight.t()
    return y if bias is None else y + bias


OUTLIER_AFTER: Final[dict[NativePrologueKind, float]] = {
    "none": 8,
    "rms_norm": 5,
    "layer_norm": 5,
    "silu_and_mul": 12,
    "relu": 12,
}
"""How many times the mean magnitude of its group an input of a quantized product must exceed to be an outlier, by the
prologue that made it."""


def quantize_activations(x: torch.Tensor, outlier_after: float, group: int = 32) -> torch.Tensor:
    """What products of integers see of x [T, n]: each value as a multiple of its scale, or as it is.

    A row is cut in groups: of 32 values where weights have groups of 32 too, of 128 where they have a scale an output.
    The last group may be shorter, by a multiple of 32. What exceeds `outlier_after` times its group's mean magnitude is
    an outlier, and is multiplied as a float, as in LLM.int8() (Dettmers et al., 2022, section 3.2). The others are
    rounded to -127..127 scales, of which their largest magnitude is 127.

    Returns:
        float64 [T, n], so that a product with it rounds nothing more.
    """
    num_rows, size = x.shape
    padded = size + -size % 32
    groups = torch.nn.functional.pad(x.float(), (0, -size % group)).view(num_rows, -1, group)
    lengths = (padded - torch.arange(0, padded, group)).clamp(max=group)
    magnitudes = groups.abs()
    is_outlier = magnitudes > (magnitudes.sum(-1) * (outlier_after / lengths)).unsqueeze(-1)
    top = magnitudes.masked_fill(is_outlier, 0).amax(-1, keepdim=True)
    inverse = torch.tensor(127.0, device=x.device) / top  # not 127 / top, which is 127 times the rounded 1 / top
    steps = torch.round(groups * torch.where(top > 1e-30, inverse, 0.0))
    seen = torch.where(is_outlier, groups.double(), steps.double() * (top / 127).double())
    return seen.view(num_rows, -1)[:, :size]


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, prologue: NativePrologueKind, group: int = 32
) -> torch.Tensor:
    """`linear` over a matrix of integers, after a prologue of that kind: products see activations as
    `quantize_activations` gives them. `weight` [out, in] are the matrix's values, in floats."""
    y = quantize_activations(x, OUTLIER_AFTER[prologue], group) @ weight.double().t()
    return (y if bias is None else y + bias.double()).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension, computed in fp32; the result has x's dtype."""
    x32 = x.float()
    normed = x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm (Ba et al., 2016) over the last dimension, computed in fp32; the result has x's dtype."""
    x32 = x.float()
    centered = x32 - x32.mean(-1, keepdim=True)
    normed = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def activate(x: torch.Tensor, kernel: str) -> torch.Tensor:
    """An activation function over rows [T, n]; gated (SwiGLU and its relatives, Shazeer, 2020) over rows [T, 2 * n],
    the gate first: function(gate) * up."""
    activation, is_gated = find_activation(kernel)
    if not is_gated:
        return activation.definition(x)
    gate, up = x.chunk(2, dim=-1)
    return activation.definition(gate) * up


def apply_prologue(x: torch.Tensor, prologue: Prologue) -> torch.Tensor:
    """What a linear layer does to its rows [T, n] first."""
    if prologue.kind == "none":
        return x
    if prologue.kind not in NORM_KINDS:
        return activate(x, prologue.kind)
    assert prologue.weight is not None, "norms have a weight"
    if prologue.kind == "rms_norm":
        return rms_norm(x, prologue.weight, prologue.eps)
    assert prologue.bias is not None, "LayerNorm has a bias"
    return layer_norm(x, prologue.weight, prologue.bias, prologue.eps)


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


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K or V [T, num_kv_heads, head_dim] in int8, symmetric, with a float32 scale [T, num_kv_heads] for each token and
    head: the largest magnitude is 127."""
    x32 = x.float()
    scale = x32.abs().amax(-1) / 127
    quantized = torch.round(x32 / torch.where(scale > 0, scale, 1.0)[..., None])
    return quantized.clamp(-127, 127).to(torch.int8), scale


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Put key and value [T, num_kv_heads, head_dim] into their slots, int64 [T], in the type of the memory; slot -1
    writes nothing."""
    _write(key, cache.key, cache.key_scale, slot_mapping)
    _write(value, cache.value, cache.value_scale, slot_mapping)


def _write(
    x: torch.Tensor, memory: torch.Tensor, memory_scale: torch.Tensor | None, slot_mapping: torch.Tensor
) -> None:
    block_size = memory.shape[2]
    scale = None
    if memory_scale is not None:
        x, scale = quantize_kv(x)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        memory[slot // block_size, :, slot % block_size] = x[token]
        if memory_scale is not None and scale is not None:
            memory_scale[slot // block_size, :, slot % block_size] = scale[token]


def paged_attention(
    query: torch.Tensor,
    cache: KVCache,
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
        keys = _sequence(cache.key, cache.key_scale, blocks, seq_len)
        values = _sequence(cache.value, cache.value_scale, blocks, seq_len)
        visible = visible_keys(rows.stop - rows.start, seq_len, sliding_window, query.device)
        out[rows] = _attend(query[rows].float(), keys, values, visible, scale).to(query.dtype)
    return out


def visible_keys(num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Which of keys 0..seq_len-1 each of the last `num_queries` tokens sees: bool [num_queries, seq_len]."""
    positions = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    visible = keys <= positions
    return visible if sliding_window is None else visible & (keys > positions - sliding_window)


def _sequence(
    memory: torch.Tensor, memory_scale: torch.Tensor | None, blocks: torch.Tensor, seq_len: int
) -> torch.Tensor:
    """One sequence out of its blocks, in order: float32 [num_kv_heads, seq_len, head_dim]."""
    values = memory[blocks].float()
    if memory_scale is not None:
        values = values * memory_scale[blocks][..., None]
    return values.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[0]
    scores = torch.einsum("qhd,hkd->hqk", query, keys.repeat_interleave(group, dim=0)) * scale
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1).nan_to_num(0.0)
    return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, dim=0))
