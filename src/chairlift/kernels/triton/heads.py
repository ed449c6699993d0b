"""Norms of heads, rotary embedding, and the write of K and V to their slots, in one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from chairlift.kernels.attention import AttentionMetadata, AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.triton.attention_kernels import round_to
from chairlift.kernels.triton.launch import Launch, aligned, pointer
from chairlift.kernels.triton.typical_shapes import TYPICAL_SHAPES

MAX_TILE_VALUES: Final = 4096
"""The maximum number of values of heads that a program computes at once."""

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2 ** 23: the sum with it rounds a small float32 to an integer, half to even."""


@triton.jit
def _normalize(x: tl.tensor, squares: tl.tensor, weight: tl.tensor, EPS: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    """RMSNorm of heads with the means of squares [HEADS], rounded to TYPE."""
    factors = tl.div_rn(1.0, tl.sqrt_rn(squares + EPS))
    return round_to(x * factors[:, None] * weight[None, :], TYPE).to(tl.float32)


@triton.jit
def _prepare(
    source: tl.tensor,
    mask: tl.tensor,
    weight: tl.tensor,
    angles: tl.tensor,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """The heads at the pointers `source` [HEADS, 1] after norm and rotation: float32 [HEADS, WIDTH].

    Args:
        angles: the cosines, then the sines of the position.
        NORM: "", "before" or "after" the rotation.
    """
    TYPE: tl.constexpr = source.dtype.element_ty
    HALF: tl.constexpr = ROTATED // 2
    dims = tl.arange(0, WIDTH)
    is_dim = dims < HEAD_DIM
    mask = mask & is_dim[None, :]
    x = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM != "":
        weights = tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    if NORM == "before":
        squares = tl.sum(x * x, 1) / HEAD_DIM
        x = _normalize(x, squares, weights, EPS, TYPE)
    if ROTATED > 0:
        is_rotated = dims < ROTATED
        angle = tl.where(dims < HALF, dims, dims - HALF)
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        cosine = tl.load(angles + angle, mask=is_rotated, other=1.0)
        sine = tl.load(angles + HALF + angle, mask=is_rotated, other=0.0)
        y = tl.load(source + partner[None, :], mask=mask & is_rotated[None, :], other=0.0).to(tl.float32)
        if NORM == "before":
            partner_weights = tl.load(weight + partner, mask=is_rotated, other=0.0).to(tl.float32)
            y = _normalize(y, squares, partner_weights, EPS, TYPE)
        x = round_to(x * cosine[None, :] + y * tl.where(dims < HALF, -sine, sine)[None, :], TYPE).to(tl.float32)
    if NORM == "after":
        x = _normalize(x, tl.sum(x * x, 1) / HEAD_DIM, weights, EPS, TYPE)
    return x


@triton.jit
def _write(
    x: tl.tensor,
    memory: tl.tensor,
    scales: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    HEAD_DIM: tl.constexpr,
    HAS_SCALES: tl.constexpr,
) -> None:
    """Write heads x [HEADS, WIDTH] to the rows `places` [HEADS] of memory, quantized if it has scales."""
    dims = tl.arange(0, x.shape[1])
    rows = memory + places[:, None] * HEAD_DIM + dims[None, :]
    is_written = mask[:, None] & (dims < HEAD_DIM)[None, :]
    if HAS_SCALES:
        scale = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)
        x = tl.div_rn(x, tl.where(scale > 0.0, scale, 1.0)[:, None])
        tl.store(rows, ((x + _ROUNDING) - _ROUNDING).to(tl.int8), mask=is_written)
        tl.store(scales + places, scale, mask=mask)
    else:
        tl.store(rows, round_to(x, memory.dtype.element_ty), mask=is_written)


@triton.jit
def prepare(
    qkv: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    query_scales: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NUM_PROJECTIONS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    EPS: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_QUERY_SCALES: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
) -> None:
    """Prepare TILE heads of a token's query, or write heads of its K and V; the grid is (tokens, parts)."""
    TYPE: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    dims = tl.arange(0, WIDTH)
    angles = cos_sin
    if ROTATED > 0:
        position = tl.load(positions + token)
        angles = cos_sin + position * ROTATED
    row = qkv + token * ((HEADS + NUM_PROJECTIONS * KV_HEADS) * HEAD_DIM)
    if part < QUERY_PARTS:
        heads = part * TILE + tl.arange(0, TILE)
        is_head = heads < HEADS
        source = row + heads[:, None] * HEAD_DIM
        x = _prepare(source, is_head[:, None], query_weight, angles, EPS, QUERY_NORM, ROTATED, HEAD_DIM, WIDTH)
        if HAS_QUERY_SCALES:
            x = x * tl.load(query_scales + position)
        target = query + (token * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, round_to(x, TYPE), mask=is_head[:, None] & (dims < HEAD_DIM)[None, :])
    else:
        heads = (part - QUERY_PARTS) * TILE + tl.arange(0, TILE)
        slot = tl.load(slots + token)
        is_written = heads < tl.where(slot >= 0, KV_HEADS, 0)
        places = (slot // BLOCK_SIZE * KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
        source = row + (HEADS + heads)[:, None] * HEAD_DIM
        x = _prepare(source, is_written[:, None], key_weight, angles, EPS, KEY_NORM, ROTATED, HEAD_DIM, WIDTH)
        _write(x, key, key_scale, places, is_written, HEAD_DIM, HAS_SCALES)
        if not KEYS_ARE_VALUES:
            source += (NUM_PROJECTIONS - 1) * KV_HEADS * HEAD_DIM
            mask = is_written[:, None] & (dims < HEAD_DIM)[None, :]
            x = tl.load(source + dims[None, :], mask=mask, other=0.0).to(tl.float32)
            if NORMS_VALUES:
                x = _normalize(x, tl.sum(x * x, 1) / HEAD_DIM, tl.full((WIDTH,), 1.0, tl.float32), EPS, TYPE)
            _write(x, value, value_scale, places, is_written, HEAD_DIM, HAS_SCALES)


def prepare_heads(
    shape: AttentionShape,
    qkv: torch.Tensor,
    rotary: RotaryStep | None,
    cache: KVCache,
    metadata: AttentionMetadata,
    qk_norm: QKNorm | None,
) -> torch.Tensor:
    """Write K and V of a step to their slots, and return its query: rows [T, at least num_heads * head_dim].

    Arguments as for `AttentionBackend.forward`. The query remains in qkv if it has neither norm, rotation nor factors.
    """
    changes_query = rotary is not None or qk_norm is not None
    query = qkv.new_empty((len(qkv), shape.num_heads * shape.head_dim)) if changes_query else qkv
    scales = None if rotary is None else rotary.query_scales
    launch, num_parts = prepare_launch(
        shape,
        metadata.block_size,
        (qkv.shape[1] // shape.head_dim - shape.num_heads) // shape.num_kv_heads,
        0 if rotary is None else rotary.cos_sin_cache.shape[1],
        scales is not None,
        _norm_options(qk_norm),
    )
    launch(
        (len(qkv), num_parts),
        qkv,
        qkv if qk_norm is None else aligned(qk_norm.query),
        qkv if qk_norm is None or qk_norm.key is None else aligned(qk_norm.key),
        metadata.slot_mapping if rotary is None else rotary.positions,
        query if rotary is None else rotary.cos_sin_cache,
        query if scales is None else scales,
        metadata.slot_mapping,
        query,
        cache.key,
        cache.value,
        query if cache.key_scale is None else cache.key_scale,
        query if cache.value_scale is None else cache.value_scale,
    )
    return query


NormOptions = tuple[str, str, bool, float]
"""QUERY_NORM, KEY_NORM, NORMS_VALUES and EPS of `prepare`."""


def _norm_options(norm: QKNorm | None) -> NormOptions:
    if norm is None:
        return "", "", False, 0.0
    order = "after" if norm.follows_rotation else "before"
    return order, "" if norm.key is None else order, norm.norms_values, norm.eps


@cache
def prepare_launch(
    shape: AttentionShape,
    block_size: int,
    num_projections: int,
    num_rotated: int,
    has_query_scales: bool,
    norm: NormOptions,
) -> tuple[Launch, int]:
    """The launch of `prepare`, and the number of programs of each token."""
    width = max(16, int(triton.next_power_of_2(shape.head_dim)))
    tile = min(MAX_TILE_VALUES // width, int(triton.next_power_of_2(shape.num_heads)))
    query_norm, key_norm, norms_values, eps = norm
    query_parts = -(-shape.num_heads // tile) if num_rotated or query_norm else 0
    constants = {
        "HEADS": shape.num_heads,
        "KV_HEADS": shape.num_kv_heads,
        "NUM_PROJECTIONS": num_projections,
        "HEAD_DIM": shape.head_dim,
        "WIDTH": width,
        "BLOCK_SIZE": block_size,
        "TILE": tile,
        "QUERY_PARTS": query_parts,
        "EPS": eps,
        "QUERY_NORM": query_norm,
        "KEY_NORM": key_norm,
        "NORMS_VALUES": norms_values,
        "ROTATED": num_rotated,
        "HAS_QUERY_SCALES": has_query_scales,
        "HAS_SCALES": shape.kv_dtype == torch.int8,
        "KEYS_ARE_VALUES": shape.keys_are_values,
    }
    activations, kv = pointer(shape.dtype), pointer(shape.kv_dtype)
    # The query is in place of what is not read.
    is_read = (num_rotated > 0, has_query_scales, shape.kv_dtype == torch.int8)
    angles, factors, scales = ("*fp32" if each else activations for each in is_read)
    types = (activations, activations, activations, "*i64", angles, factors, "*i64", activations, kv, kv)
    launch = Launch(prepare, constants, (*types, scales, scales))
    return launch, query_parts + (-(-shape.num_kv_heads // tile) if num_projections else 0)


def variants() -> Iterator[tuple[str, Launch]]:
    """The launches for typical models, and for one with norms of heads."""
    none: NormOptions = ("", "", False, 0.0)
    for model, shape in TYPICAL_SHAPES.items():
        sizes = (1, 64) if shape.keys_are_values else (2, shape.head_dim)
        yield f"prepare heads, {model}", prepare_launch(shape, 16, *sizes, False, none)[0]
    qwen3 = replace(shape, num_heads=32, num_kv_heads=8, head_dim=128, keys_are_values=False)
    yield "prepare heads, qwen3-8b", prepare_launch(qwen3, 16, 2, 128, False, ("before", "before", False, 1e-6))[0]
