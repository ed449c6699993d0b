"""The preparation of heads and the write of K and V equal the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from chairlift.kernels.attention import AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.triton.attention import TritonAttention
from chairlift.kernels.triton.heads import prepare_heads, variants
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.rotary import rotary_table
from support import reference_kernels as reference
from support.case_loop import loop_over
from support.packed_steps import Tables, pack

CPU = torch.device("cpu")
WORK = [(0, 3, 7), (1, 0, 2), (2, 40, 41)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make_rotary(positions: torch.Tensor, num_dims: int, has_scales: bool = False) -> RotaryStep:
    scales = torch.rand(64) + 0.5 if has_scales else None
    return RotaryStep(positions, rotary_table(RopeConfig(), num_dims, 64, CPU), scales)


def check(
    shape: AttentionShape, num_rotated: int = 0, *, has_scales: bool = False, kv_projections: int = 2, **norm: Any
) -> None:
    """Compare query and memory with the reference: the integers are equal, and other slots keep their values."""
    torch.manual_seed(0)
    tables = Tables(16, 8)
    step = pack(tables, WORK, num_padding=2)
    cache = TritonAttention(shape).allocate(tables.num_blocks, tables.block_size)
    for memory in cache[:2]:
        assert memory is not None
        memory.fill_(77)
    expected_cache = KVCache(*(None if memory is None else memory.clone() for memory in cache))
    heads = shape.num_heads + kv_projections * shape.num_kv_heads
    qkv = (torch.randn(len(step.positions), heads * shape.head_dim) * 3).to(shape.dtype)
    qkv[3, shape.num_heads * shape.head_dim :] = 0  # The scale of such a head is zero.
    rotary = make_rotary(step.positions, num_rotated, has_scales) if num_rotated else None
    weights = (torch.rand(2, shape.head_dim) + 0.5).to(shape.dtype)
    has_keys = kv_projections > 0
    qk_norm = QKNorm(weights[0], weights[1] if has_keys else None, 1e-5, **norm) if norm else None
    query = prepare_heads(shape, qkv, rotary, cache, step.metadata, qk_norm)
    expected, key, value = reference.prepare_heads(shape.split(qkv.clone()), qk_norm, rotary)
    if key is not None and value is not None:
        slots = step.metadata.slot_mapping
        reference.write_kv(key, key if shape.keys_are_values else value, expected_cache, slots)
    tolerance = TOLERANCE[shape.dtype]
    actual = query[:, : shape.num_heads * shape.head_dim].view(expected.shape)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    for memory, wanted in zip(cache, expected_cache, strict=True):
        if memory is not None and wanted is not None:
            exact = memory.dtype == torch.int8
            torch.testing.assert_close(memory, wanted, rtol=0 if exact else tolerance, atol=0 if exact else tolerance)


def llama(dtype: torch.dtype = torch.float32, kv_cache_dtype: torch.dtype | None = None) -> AttentionShape:
    return AttentionShape(6, 2, 40, 0.2, dtype, CPU, kv_cache_dtype)


@loop_over("dtype", [torch.float32, torch.bfloat16, torch.float16])
@loop_over("kv_cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_types(dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> None:
    check(llama(dtype, kv_cache_dtype))
    check(llama(dtype, kv_cache_dtype), 40, norms_values=False)


@loop_over("num_rotated", [0, 16, 40])
@loop_over("norms_values", [True, False])
@loop_over("follows_rotation", [True, False])
@loop_over("kv_projections", [0, 1, 2])
def test_norms_and_rotations(num_rotated: int, norms_values: bool, follows_rotation: bool, kv_projections: int) -> None:
    """Whole and partial rotations, before and after the norms, in layers with and without K and V."""
    norm = {"norms_values": norms_values, "follows_rotation": follows_rotation}
    check(llama(), num_rotated, has_scales=num_rotated > 0, kv_projections=kv_projections, **norm)


@loop_over("kv_cache_dtype", [None, torch.int8])
def test_keys_that_are_values(kv_cache_dtype: torch.dtype | None) -> None:
    check(replace(llama(torch.bfloat16, kv_cache_dtype), keys_are_values=True), 8, kv_projections=1)


def test_many_large_heads_are_divided_among_programs() -> None:
    check(AttentionShape(20, 18, 512, 0.2, torch.float32, CPU), 64)


def test_bits_of_a_token_do_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    shape = llama()
    step = pack(Tables(16, 8), WORK)
    qkv, norm = torch.randn(len(step.positions), 10 * 40), QKNorm(torch.rand(40), torch.rand(40), 1e-5)
    cache = TritonAttention(shape).allocate(16, 8)
    together = prepare_heads(shape, qkv, make_rotary(step.positions, 40), cache, step.metadata, norm)
    for row in range(len(qkv)):
        rotary = make_rotary(step.positions[row : row + 1].clone(), 40)
        metadata = replace(step.metadata, slot_mapping=step.metadata.slot_mapping[row : row + 1].clone())
        alone = prepare_heads(shape, qkv[row : row + 1].clone(), rotary, cache, metadata, norm)
        assert torch.equal(alone[0], together[row])


def test_variants_have_names_of_their_own() -> None:
    names = [name for name, _ in variants()]
    assert len(names) == len(set(names)) > 5
