"""The kernel set "reference", which defines what kernels compute in plain torch: tests compare others with it.

`tests/conftest.py` adds it to the sets that `find_kernel_set` finds.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from chairlift.kernels.activations import GateActivation, find_activation, sigmoid
from chairlift.kernels.attention import AttentionBackend, AttentionMetadata, KVCache, ProjectedHeads, QKNorm, RotaryStep
from chairlift.kernels.interface import (
    NORM_KINDS,
    ComposedLinear,
    ComposedResidualSum,
    Kernels,
    LinearKernel,
    LoadedMatrix,
    Mixture,
    Prologue,
    RowKernel,
)
from chairlift.kernels.lora import AdaptedLinear, LoraLayer
from chairlift.kernels.routing import ExpertRouting
from chairlift.kernels.torch_set import TorchKernelSet
from chairlift.kernels.weights import load_tensor
from support.reference_recurrence import ReferenceRecurrence


def embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The rows of `table` [num_rows, size] with the int64 ids [T]: [T, size]."""
    return table[token_ids]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product of x [T, in] with the transposed weight [out, in], plus bias [out]: [T, out]."""
    y = x @ weight.t()
    return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang and Sennrich, 2019) over the last dimension, in float32; the result has the dtype of x."""
    x32 = x.float()
    normed = x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm (Ba et al., 2016) over the last dimension, in float32; the result has the dtype of x."""
    x32 = x.float()
    centered = x32 - x32.mean(-1, keepdim=True)
    normed = centered / torch.sqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    return (normed * weight.float() + bias.float()).to(x.dtype)


def activate(x: torch.Tensor, kernel: str, parameters: tuple[float, ...] = ()) -> torch.Tensor:
    """An activation function over rows [T, n]; gated (SwiGLU and its relatives, Shazeer, 2020) over rows [T, 2 * n],
    the gate first: function(factor * gate) * up, or function(factor * gate) * of_up(up)."""
    activation, is_gated = find_activation(kernel)
    if not is_gated:
        return activation.function(x, *parameters)
    gate, up = x.chunk(2, dim=-1)
    (factor,) = parameters or (1.0,)
    return activation.function(factor * gate) * (up if activation.of_up is None else activation.of_up(up))


def apply_prologue(x: torch.Tensor, prologue: Prologue) -> torch.Tensor:
    """The function of rows [T, n] that precedes the product of a linear layer."""
    if prologue.kind == "none":
        return x
    if prologue.kind not in NORM_KINDS:
        return activate(x, prologue.kind, prologue.parameters)
    assert prologue.weight is not None, "norms have a weight"
    if prologue.kind == "rms_norm":
        return rms_norm(x, prologue.weight, prologue.eps)
    assert prologue.bias is not None, "LayerNorm has a bias"
    return layer_norm(x, prologue.weight, prologue.bias, prologue.eps)


def gate(x: torch.Tensor, logits: torch.Tensor, activation: GateActivation) -> torch.Tensor:
    """The product of x [T, n] and activation(logits), [T, m]; each logit is that of n / m consecutive values."""
    factors = sigmoid(logits) if activation == "sigmoid" else F.softplus(logits)
    return x * factors.repeat_interleave(x.shape[1] // logits.shape[1], dim=1)


def choose_experts(
    logits: torch.Tensor, routing: ExpertRouting, scales: torch.Tensor | None, bias: torch.Tensor | None
) -> dict[int, float]:
    """The experts of one token and their weights, see `ExpertRouting`; arguments as for `route`, with one row."""
    scores = (logits.double().sigmoid() if routing.has_sigmoid else logits.double().softmax(0)).tolist()
    ranks = scores if bias is None else [a + b for a, b in zip(scores, bias.tolist(), strict=True)]
    experts, size = range(len(scores)), len(scores) // routing.num_groups
    groups = [experts[first : first + size] for first in experts[::size]]
    num_best = 2 if routing.has_sigmoid else 1
    groups.sort(key=lambda group: -sum(sorted((ranks[each] for each in group), reverse=True)[:num_best]))
    allowed = sorted(each for group in groups[: routing.groups_per_token] for each in group)
    chosen = sorted(allowed, key=lambda expert: -ranks[expert])[: routing.experts_per_token]
    total = sum(scores[expert] for expert in chosen)
    if routing.has_sigmoid or bias is not None:
        total = max(total + routing.sum_eps, routing.sum_min)
    factor = routing.scale / (total if routing.softmax == "chosen" else 1)
    return {expert: factor * scores[expert] * (1 if scales is None else float(scales[expert])) for expert in chosen}


class ReferenceMixture:
    """The reference implementation of a mixture of experts, which computes row by row and expert by expert."""

    def __init__(self, mixture: Mixture) -> None:
        self._norm, self._router = mixture.norm, mixture.router
        self._router_norm, self._scales = mixture.router_norm or mixture.norm, mixture.expert_scales
        self._experts = list(mixture.experts)
        self._activation, self._routing, self._bias = mixture.activation, mixture.routing, mixture.selection_bias

    def __call__(self, x: torch.Tensor, routed: torch.Tensor | None = None) -> torch.Tensor:
        routed = apply_prologue(x if routed is None else routed, self._router_norm)
        logits = linear(routed, self._router.matrix, self._router.bias)
        x = apply_prologue(x, self._norm)
        out = torch.zeros_like(x)
        for row in range(len(x)):
            for expert, weight in choose_experts(logits[row], self._routing, self._scales, self._bias).items():
                out[row] += (weight * self._expert(x[row], *self._experts[expert])).to(x.dtype)
        return out

    def _expert(self, x: torch.Tensor, up: LoadedMatrix, down: LoadedMatrix) -> torch.Tensor:
        return linear(activate(linear(x, up.matrix, up.bias), self._activation), down.matrix, down.bias)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al., 2021): of n dimensions, i and i + n/2 are a pair, rotated by positions * freq_i.

    Args:
        x: [T, heads, head_dim], of which the first n dimensions are rotated.
        positions: int64 [T].
        cos_sin_cache: float32 [max_position, n]: the cosines of the n/2 angles, then their sines.
    """
    num_dims = cos_sin_cache.shape[1]
    cos, sin = cos_sin_cache[positions][:, None, :].chunk(2, dim=-1)
    first, second = x[..., :num_dims].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., num_dims:]), dim=-1)


def prepare_heads(heads: ProjectedHeads, qk_norm: QKNorm | None, rotary: RotaryStep | None) -> ProjectedHeads:
    """Apply the norms of heads, the rotary embedding, and the factors of queries."""
    if qk_norm is not None and not qk_norm.follows_rotation:
        heads = normalize_heads(heads, qk_norm)
    query, key, value = heads
    if rotary is not None:
        rotated = partial(rotate, positions=rotary.positions, cos_sin_cache=rotary.cos_sin_cache)
        query, key = rotated(query), None if key is None else rotated(key)
    heads = ProjectedHeads(query, key, value)
    if qk_norm is not None and qk_norm.follows_rotation:
        heads = normalize_heads(heads, qk_norm)
    return heads if rotary is None else heads._replace(query=rotary.scale_queries(heads.query))


def normalize_heads(heads: ProjectedHeads, qk_norm: QKNorm) -> ProjectedHeads:
    """Apply the norms of heads, with a weight of ones for V."""
    query, key, value = heads
    if key is not None and qk_norm.key is not None:
        key = rms_norm(key, qk_norm.key, qk_norm.eps)
    if value is not None and qk_norm.norms_values:
        value = rms_norm(value, value.new_ones(value.shape[-1]), qk_norm.eps)
    return ProjectedHeads(rms_norm(query, qk_norm.query, qk_norm.eps), key, value)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize K or V [T, num_kv_heads, head_dim] to int8 with a float32 scale [T, num_kv_heads] per token and head.

    The quantization is symmetric; the largest magnitude of a head becomes 127.
    """
    x32 = x.float()
    scale = x32.abs().amax(-1) / 127
    quantized = torch.round(x32 / torch.where(scale > 0, scale, 1.0)[..., None])
    return quantized.clamp(-127, 127).to(torch.int8), scale


def write_kv(key: torch.Tensor, value: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor) -> None:
    """Write key and value [T, num_kv_heads, head_dim] into their slots in KV memory, in its type.

    Args:
        slot_mapping: int64 [T]; -1 writes nothing.
    """
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
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of packed queries over keys and values in blocks (Kwon et al., 2023, section 4.1), in float32.

    Args:
        query: [T, num_heads, head_dim]; head h reads KV head `h // (num_heads // num_kv_heads)`.
        scale: the factor of the dot products.
        sliding_window: a query at position p sees keys p - sliding_window + 1 to p; None for keys 0 to p.
        logits_soft_cap: c, where a score s becomes c * tanh(s / c) before the softmax (Gemma 2), or None.
        sinks: [num_heads], a score of each head that is part of its softmax, but has no value (gpt-oss; after Xiao et
            al., 2023), or None.

    Returns:
        [T, num_heads, head_dim] in the dtype of query. A row before the start of its sequence is padding: it sees no
        key, and its result is zero.
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
        attended = _attend(query[rows].float(), keys, values, visible, scale, logits_soft_cap, sinks)
        out[rows] = attended.to(query.dtype)
    return out


def visible_keys(num_queries: int, seq_len: int, sliding_window: int | None, device: torch.device) -> torch.Tensor:
    """Whether each of the last `num_queries` tokens sees each of keys 0 to seq_len - 1: bool [num_queries, seq_len]."""
    positions = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    keys = torch.arange(seq_len, device=device)[None, :]
    visible = keys <= positions
    return visible if sliding_window is None else visible & (keys > positions - sliding_window)


def _sequence(
    memory: torch.Tensor, memory_scale: torch.Tensor | None, blocks: torch.Tensor, seq_len: int
) -> torch.Tensor:
    """K or V of one sequence, gathered from its blocks: float32 [num_kv_heads, seq_len, head_dim]."""
    values = memory[blocks].float()
    if memory_scale is not None:
        values = values * memory_scale[blocks][..., None]
    return values.transpose(0, 1).flatten(1, 2)[:, :seq_len]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    logits_soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    group = query.shape[1] // keys.shape[0]
    scores = torch.einsum("qhd,hkd->hqk", query, keys.repeat_interleave(group, dim=0)) * scale
    if logits_soft_cap is not None:
        scores = torch.tanh(scores / logits_soft_cap) * logits_soft_cap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., : keys.shape[1]]
    return torch.einsum("hqk,hkd->qhd", weights, values.repeat_interleave(group, dim=0))


class ReferenceAttention(AttentionBackend[AttentionMetadata]):
    """The reference implementation of attention, which prepares nothing."""

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
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = prepare_heads(self.shape.split(qkv), qk_norm, rotary)
        if key is not None and value is not None:
            write_kv(key, key if self.shape.keys_are_values else value, cache, plan.slot_mapping)
        shape = self.shape
        attended = paged_attention(query, cache, plan, shape.scale, sliding_window, shape.logits_soft_cap, sinks)
        return attended.flatten(1)


def _make_linear(weight: torch.Tensor, bias: torch.Tensor | None, prologue: Prologue) -> LinearKernel:
    return ComposedLinear(_make_prologue(prologue), partial(linear, weight=weight, bias=bias))


def _make_prologue(prologue: Prologue) -> RowKernel:
    return partial(apply_prologue, prologue=prologue)


def _add_lora(base: LinearKernel, prologue: Prologue, layer: LoraLayer) -> LinearKernel:
    return AdaptedLinear(base, _make_prologue(prologue), layer)


REFERENCE = Kernels(
    name="reference",
    load_matrix=load_tensor,
    load_router=load_tensor,
    make_embedding=lambda table: partial(embedding, table=table),
    make_linear=_make_linear,
    add_lora=_add_lora,
    make_residual_sum=partial(ComposedResidualSum, make_prologue=_make_prologue),
    make_mixture=ReferenceMixture,
    make_recurrence=ReferenceRecurrence,
    gate=gate,
    attention=ReferenceAttention,
)


class ReferenceKernelSet(TorchKernelSet):
    """The set of the kernels in this module, with the memory of the torch kernels."""

    name = "reference"

    def make_kernels(self, quantization: str | None) -> Kernels:
        return REFERENCE
