"""Interpreted Triton attention equals the reference, and no bit of a sequence depends on the others of its step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.kernels.attention import AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.triton import attention
from chairlift.kernels.triton.attention import TritonAttention
from chairlift.kernels.triton.attention_sizes import SPLIT_KEYS
from support import reference_kernels as reference
from support.case_loop import loop_over
from support.packed_steps import Tables, pack

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Work = list[tuple[int, int, int]]
MIXED: Work = [(0, 31, 32), (1, 0, 13), (2, 7, 8), (3, 15, 27), (4, 0, 1), (5, 16, 19)]
"""Decodes, a prompt, chunks and verified drafts, which end before, at and after the border of a block."""


def random_cache(backend: TritonAttention, tables: Tables) -> KVCache:
    """Memory full of values of other sequences, so that a wrong read changes the result."""
    cache = backend.allocate(tables.num_blocks, tables.block_size)
    for memory in cache[:2]:
        assert memory is not None
        memory.random_(-127, 128) if memory.dtype == torch.int8 else memory.normal_()
    for scales in cache[2:]:
        if scales is not None:
            scales.uniform_(0, 0.02)
    return cache


def copy(cache: KVCache) -> KVCache:
    return KVCache(*(None if memory is None else memory.clone() for memory in cache))


def check(
    shape: AttentionShape,
    work: Work = MIXED,
    window: int | None = None,
    *,
    block_size: int = 8,
    num_padding: int = 0,
    sinks: torch.Tensor | None = None,
    kv_projections: int = 2,
    rotary: Callable[[torch.Tensor], RotaryStep] | None = None,
    norm: QKNorm | None = None,
) -> None:
    """Compare the result and the whole memory of a step with the reference."""
    torch.manual_seed(0)
    tables = Tables(sum(-(-stop // block_size) for _, _, stop in work) + 5, block_size)
    step = pack(tables, work, num_padding)
    fast, slow = TritonAttention(shape), reference.ReferenceAttention(shape)
    cache = random_cache(fast, tables)
    expected_cache = copy(cache)
    heads = shape.num_heads + kv_projections * shape.num_kv_heads
    qkv = torch.randn(len(step.positions), heads * shape.head_dim).to(shape.dtype)
    turn = None if rotary is None else rotary(step.positions)
    out = fast.forward(qkv.clone(), turn, cache, fast.plan(step.metadata), window, norm, sinks)
    expected = slow.forward(qkv, turn, expected_cache, step.metadata, window, norm, sinks)
    assert out.dtype == shape.dtype
    assert torch.equal(out[:num_padding], torch.zeros_like(out[:num_padding]))
    tolerance = TOLERANCE[shape.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for memory, wanted in zip(cache, expected_cache, strict=True):
        if memory is not None and wanted is not None:
            torch.testing.assert_close(memory, wanted, rtol=tolerance if turn or norm else 0, atol=1e-6)


def llama(head_dim: int = 16, heads: tuple[int, int] = (4, 2), dtype: torch.dtype = torch.float32) -> AttentionShape:
    return AttentionShape(*heads, head_dim, head_dim**-0.5, dtype, CPU)


@loop_over(
    ("head_dim", "heads", "block_size"),
    [(64, (1, 1), 1), (80, (2, 2), 8), (96, (9, 3), 16), (128, (4, 2), 32), (256, (8, 1), 24), (320, (2, 1), 16)],
)
def test_shapes(head_dim: int, heads: tuple[int, int], block_size: int) -> None:
    check(llama(head_dim, heads), block_size=block_size, window=None if block_size > 8 else 8)


def test_a_group_of_more_heads_than_a_tile_has_rows() -> None:
    check(llama(16, (40, 1)))


@loop_over("dtype", [torch.float32, torch.bfloat16, torch.float16])
@loop_over("kv_cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_types(dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> None:
    check(replace(llama(dtype=dtype), kv_cache_dtype=kv_cache_dtype))


@loop_over("window", [None, 1, 20])
@loop_over("soft_cap", [None, 2.0])
@loop_over("has_sinks", [True, False])
def test_windows_soft_caps_and_sinks(window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    sinks = torch.tensor([3.0, -2.0, 0.0, 9.0]) if has_sinks else None
    work: Work = [(0, 40, 41), (1, 0, 30), (2, 9, 30), (3, 2, 3)]
    check(replace(llama(), logits_soft_cap=soft_cap), work, window, sinks=sinks)


@loop_over("kv_cache_dtype", [torch.float32, torch.int8])
def test_keys_that_are_values(kv_cache_dtype: torch.dtype) -> None:
    shape = replace(llama(40, (4, 1)), kv_cache_dtype=kv_cache_dtype, keys_are_values=True)
    check(shape, kv_projections=1)


@loop_over("window", [None, 700])
@loop_over("max_bytes", [attention.MAX_SPLIT_BYTES, 0])
def test_long_contexts(window: int | None, max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of several splits, in parallel or one after the other, that end at and beside the border of a split."""
    monkeypatch.setattr(attention, "MAX_SPLIT_BYTES", max_bytes)
    lengths = (SPLIT_KEYS - 1, SPLIT_KEYS, SPLIT_KEYS + 1, 3 * SPLIT_KEYS + 7)
    work = [(i, length - 2, length) for i, length in enumerate(lengths)]
    check(llama(), [*work, (9, 2 * SPLIT_KEYS - 5, 2 * SPLIT_KEYS + 4)], window, sinks=torch.ones(4), block_size=64)


@settings(max_examples=12)
@given(data=st.data(), block_size=st.sampled_from((1, 3, 8)), window=st.sampled_from((None, 1, 6)))
def test_any_step(data: st.DataObject, block_size: int, window: int | None) -> None:
    """Any mix of rows and any padding in front; memory outside the written slots does not change."""
    spans = st.tuples(st.integers(0, 20), st.integers(0, 12))
    drawn = data.draw(st.lists(spans, min_size=1, max_size=4))
    work = [(i, start, start + count) for i, (start, count) in enumerate(drawn)]
    padding = data.draw(st.integers(0, 3)) if work[0][1] == 0 else 0
    if padding or any(count for _, count in drawn):
        check(llama(), work, window, block_size=block_size, num_padding=padding)


@dataclass(frozen=True)
class Sequences:
    """Sequences with contents of their own: K and V of all positions, and the rows of qkv that are computed last."""

    shape: AttentionShape
    lengths: tuple[int, ...]
    window: int | None
    sinks: torch.Tensor | None

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads + 2 * self.shape.num_kv_heads

    def rows(self, sequence: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sequence)
        return torch.randn(self.lengths[sequence], self.num_heads * self.shape.head_dim, generator=generator)

    def attend(self, batch: list[tuple[int, int]], seed: int) -> list[torch.Tensor]:
        """The results of each (sequence, number of last tokens) in one step, whose other tokens are in memory."""
        tables = Tables(sum(-(-self.lengths[each] // 16) for each, _ in batch) + 3, 16, seed)
        backend = TritonAttention(self.shape)
        cache = random_cache(backend, tables)
        for sequence, count in batch:
            length = self.lengths[sequence]
            written = pack(tables, [(sequence, 0, length)]).metadata.slot_mapping[: length - count]
            heads = self.rows(sequence)[: length - count].view(length - count, self.num_heads, self.shape.head_dim)
            key, value = heads[:, self.shape.num_heads :].chunk(2, dim=1)
            reference.write_kv(key, value, cache, written)
        step = pack(tables, [(each, self.lengths[each] - count, self.lengths[each]) for each, count in batch])
        qkv = torch.cat([self.rows(each)[self.lengths[each] - count :] for each, count in batch])
        out = backend.forward(qkv, None, cache, backend.plan(step.metadata), self.window, None, self.sinks)
        return list(out.split([count for _, count in batch]))


@loop_over(("kv_cache_dtype", "window"), [(torch.float32, None), (torch.bfloat16, 300), (torch.int8, None)])
def test_bits_do_not_depend_on_the_batch(kv_cache_dtype: torch.dtype, window: int | None) -> None:
    """Each sequence alone, and in random batches with others of any length, as a decode, a chunk or a prompt."""
    shape = replace(llama(16, (4, 1)), kv_cache_dtype=kv_cache_dtype)
    sequences = Sequences(shape, (1, 30, 65, 100, 514, 1090), window, torch.ones(4))
    alone = [sequences.attend([(each, 1)], 0)[0] for each in range(len(sequences.lengths))]
    rng = random.Random(0)
    for seed in range(14):
        chosen = rng.sample(range(len(alone)), rng.randint(1, 3))
        batch = [(each, min(sequences.lengths[each], rng.choice((1, 1, 2, 9, 13)))) for each in chosen]
        for (each, count), out in zip(batch, sequences.attend(batch, seed), strict=True):
            assert torch.equal(out[-1], alone[each][0]), (batch, each, count)


def test_heads_that_are_too_large_are_rejected() -> None:
    with pytest.raises(ConfigError, match="head_dim must be at most 576 with triton kernels, got 1024"):
        TritonAttention(llama(1024))
