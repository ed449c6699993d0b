"""The fast torch kernels equal the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.kernels import torch_ops
from chairlift.kernels.activations import ACTIVATIONS, GATED_SUFFIX, activation_kernel
from chairlift.kernels.attention import AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.interface import NO_PROLOGUE, Prologue
from chairlift.kernels.kernel_memory import TILE_BYTES
from chairlift.kernels.kernel_set import get_kernels
from chairlift.kernels.torch_attention import TorchAttention
from chairlift.kernels.torch_kernels import TORCH
from chairlift.kernels.torch_plan import TILE_OVERHEAD_BYTES, cut_tiles
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.rotary import rotary_table
from support import reference_kernels as reference
from support.case_loop import loop_over
from support.packed_steps import Tables, pack
from support.reference_kernels import REFERENCE

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}


def assert_close(actual: Any, expected: Any, dtype: torch.dtype = torch.float32) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])


def random_cache(backend: TorchAttention, num_blocks: int, block_size: int) -> KVCache:
    """Memory full of values of other sequences, so that a wrong read changes the result."""
    cache = backend.allocate(num_blocks, block_size)
    cache.key.normal_()
    cache.value.normal_()
    return cache


def attend_both(
    shape: AttentionShape,
    tables: Tables,
    work: list[tuple[int, int, int]],
    window: int | None,
    *,
    num_padding: int = 0,
    with_rotary: bool = True,
    with_norm: bool = False,
    norms_values: bool = False,
    norms_rotated: bool = False,
    kv_projections: int = 2,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one step with both implementations, compare their memory, and return both results: (fast, expected)."""
    step = pack(tables, work, num_padding)
    fast, slow = TorchAttention(shape), reference.ReferenceAttention(shape)
    cache = random_cache(fast, tables.num_blocks, tables.block_size)
    slow_cache = KVCache(cache.key.clone(), cache.value.clone())
    tokens = len(step.positions)
    width = (shape.num_heads + kv_projections * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(tokens, width, dtype=shape.dtype)
    norm: QKNorm | None = None
    if with_norm:
        query, key = torch.rand(2, shape.head_dim, dtype=shape.dtype)
        norm = QKNorm(query, key if kv_projections else None, 1e-5, norms_values, norms_rotated)
    rotary: RotaryStep | None = None
    if with_rotary:
        rotary = RotaryStep(step.positions, rotary_table(RopeConfig(), shape.head_dim, 512, CPU))
    out = fast.forward(qkv.clone(), rotary, cache, fast.plan(step.metadata), window, norm, sinks)
    expected = slow.forward(qkv, rotary, slow_cache, slow.plan(step.metadata), window, norm, sinks)
    for half, slow_half in ((cache.key, slow_cache.key), (cache.value, slow_cache.value)):
        assert_close(half[: tables.num_blocks], slow_half[: tables.num_blocks], shape.dtype)
    return out, expected


HEADS, BLOCK_SIZES, HEAD_DIMS = ((1, 1), (4, 4), (4, 2), (9, 3), (8, 1)), (1, 8, 16, 32), (64, 80, 128)
GRID = [
    (HEAD_DIMS[(i + j) % len(HEAD_DIMS)], heads, block_size)
    for i, heads in enumerate(HEADS)
    for j, block_size in enumerate(BLOCK_SIZES)
]
"""Every pair of two of the three."""


@loop_over(("head_dim", "heads", "block_size"), GRID)
def test_attention_over_shapes(head_dim: int, heads: tuple[int, int], block_size: int) -> None:
    """Decode, prefill and chunk rows mixed, sequences ending before, at and after the border of a block."""
    torch.manual_seed(0)
    shape = AttentionShape(*heads, head_dim, head_dim**-0.5, torch.float32, CPU)
    work = [(0, 31, 32), (1, 0, 33), (2, 7, 8), (3, 15, 31), (4, 0, 1), (5, 8, 17), (6, 16, 17), (7, 0, 16)]
    for window in (None, 8):
        options = {"with_norm": window is None or block_size > 8, "norms_rotated": block_size > 8}
        out, expected = attend_both(shape, Tables(400, block_size), work, window, **options)
        assert_close(out, expected)


@loop_over("tile_bytes", [1, 1 << 14, 1 << 22])
@loop_over("window", [None, 1, 5, 40, 1000])
def test_attention_over_tiles_and_windows(monkeypatch: pytest.MonkeyPatch, tile_bytes: int, window: int | None) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(TILE_BYTES, "cpu", tile_bytes)
    monkeypatch.setitem(TILE_OVERHEAD_BYTES, "cpu", tile_bytes)
    shape = AttentionShape(4, 2, 16, 0.3, torch.float32, CPU)
    work = [(i, length - 1, length) for i, length in enumerate((5, 90, 1, 17, 16, 64, 88, 3))]
    out, expected = attend_both(shape, Tables(64, 8), [*work, (8, 30, 60)], window, with_rotary=False)
    assert_close(out, expected)


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("window", [None, 20])
@loop_over("kv_projections", [0, 1, 2])
def test_norms_of_values_and_layers_without_projections(
    kv_projections: int, window: int | None, dtype: torch.dtype
) -> None:
    """Without projections of K and V the layer reads the memory of this step's tokens, which it does not write."""
    torch.manual_seed(0)
    shape = AttentionShape(6, 2, 32, 0.8, dtype, CPU)
    work = [(0, 40, 41), (1, 0, 50), (2, 9, 30), (3, 2, 3)]
    options: dict[str, Any] = {"kv_projections": kv_projections, "with_norm": True, "norms_values": True}
    out, expected = attend_both(shape, Tables(32, 16), work, window, **options)
    assert_close(out, expected, dtype)


@loop_over("dtype", [torch.float32, torch.bfloat16])
@loop_over("has_sinks", [False, True])
@loop_over(("window", "soft_cap"), [(None, None), (20, None), (None, 2.0), (20, 2.0)])
def test_soft_caps_and_sinks(dtype: torch.dtype, window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    torch.manual_seed(0)
    shape = AttentionShape(6, 2, 32, 0.8, dtype, CPU, logits_soft_cap=soft_cap)
    work = [(0, 40, 41), (1, 0, 50), (2, 9, 30), (3, 2, 3), (4, 90, 91)]
    sinks = torch.randn(6, dtype=dtype) * 3 if has_sinks else None
    out, expected = attend_both(shape, Tables(32, 16), work, window, sinks=sinks)
    assert out.dtype == dtype
    assert_close(out, expected, dtype)


@given(data=st.data(), block_size=st.sampled_from((1, 3, 8)), window=st.sampled_from((None, 1, 6)))
def test_any_step(data: st.DataObject, block_size: int, window: int | None) -> None:
    """Any mix of rows and any padding in front; memory outside the written slots does not change."""
    spans = st.tuples(st.integers(0, 20), st.integers(1, 12))
    drawn = data.draw(st.lists(spans, min_size=1, max_size=6))
    work = [(i, start, start + count) for i, (start, count) in enumerate(drawn)]
    padding = data.draw(st.integers(0, 3)) if work[0][1] == 0 else 0
    shape = AttentionShape(4, 2, 8, 0.35, torch.float32, CPU)
    out, expected = attend_both(shape, Tables(200, block_size), work, window, num_padding=padding)
    assert_close(out, expected)


@loop_over("num_padding", [0, 1])
def test_padding_before_a_sequence(num_padding: int) -> None:
    """A step of rows with slot -1 only reads and writes nothing."""
    shape = AttentionShape(4, 2, 8, 0.35, torch.float32, CPU)
    tables = Tables(8, 4)
    tables.grow(0, 1)
    out, expected = attend_both(shape, tables, [(0, 0, 0), (1, 4, 6)], None, num_padding=num_padding)
    assert torch.equal(out[:num_padding], torch.zeros(num_padding, 4 * 8))
    assert_close(out, expected)


def test_a_plan_serves_layers_of_several_windows() -> None:
    """All gathers of a plan share scratch memory; alternating layers must not change the result."""
    torch.manual_seed(0)
    shape = AttentionShape(2, 1, 8, 0.35, torch.float32, CPU)
    step = pack(Tables(64, 4), [(0, 40, 41), (1, 3, 4), (2, 10, 30)])
    fast, slow = TorchAttention(shape), reference.ReferenceAttention(shape)
    plan = fast.plan(step.metadata)
    for window in (4, None, 4, 9, None):
        cache = random_cache(fast, 64, 4)
        qkv = torch.randn(22, 4 * 8)
        out = fast.forward(qkv.clone(), None, cache, plan, window, None)
        expected = slow.forward(qkv, None, cache, step.metadata, window, None)
        assert_close(out, expected)


@given(
    st.lists(st.integers(1, 300), max_size=40),
    st.integers(1, 1 << 16),
    st.integers(1, 1 << 22),
    st.integers(1, 1 << 22),
)
def test_tiles_are_consecutive(num_blocks: list[int], block_bytes: int, tile_bytes: int, overhead: int) -> None:
    num_blocks.sort(reverse=True)
    tiles = cut_tiles(num_blocks, block_bytes, tile_bytes, overhead)
    assert [row for start, stop in tiles for row in range(start, stop)] == list(range(len(num_blocks)))
    for start, stop in tiles:
        held = (stop - start) * num_blocks[start]
        assert stop - start == 1 or held * block_bytes <= tile_bytes
        padding = held - sum(num_blocks[start:stop])
        assert padding * block_bytes <= overhead


def test_a_tile_ends_at_too_much_padding_or_at_the_size_of_the_cache() -> None:
    assert cut_tiles([9, 9, 8, 8], 2, 200, overhead_bytes=2) == [(0, 3), (3, 4)]
    assert cut_tiles([9, 9, 8, 8], 1, 200, overhead_bytes=2) == [(0, 4)]
    assert cut_tiles([9, 9, 8, 8], 1, 18, overhead_bytes=2) == [(0, 2), (2, 4)]
    assert cut_tiles([], 1, 1, overhead_bytes=2) == []


def test_a_window_at_the_end_of_the_longest_table() -> None:
    """The longest sequence reads one block, the last of the table, and shares a tile with one that reads two."""
    shape = AttentionShape(4, 2, 8, 0.35, torch.float32, CPU)
    out, expected = attend_both(shape, Tables(16, 4), [(0, 15, 16), (1, 9, 10)], 4)
    assert_close(out, expected)


def test_unknown_sets_and_types_of_memory_are_rejected() -> None:
    shape = AttentionShape(4, 2, 8, 0.35, torch.float32, CPU, kv_cache_dtype=torch.int8)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be float32 with torch kernels, .* got int8"):
        TorchAttention(shape)
    with pytest.raises(ConfigError, match=r"kernels must be one of native, torch, .*got 'flash'"):
        get_kernels("flash")


def prologues(size: int, dtype: torch.dtype) -> list[Prologue]:
    weight, bias = torch.randn(2, size, dtype=dtype)
    norms = [Prologue("rms_norm", weight, eps=1e-5), Prologue("layer_norm", weight, bias, 1e-5)]
    gated = [Prologue(activation_kernel(name, True), parameters=(0.7,)) for name in ACTIVATIONS if name != "xielu"]
    return [NO_PROLOGUE, *norms, *gated, Prologue("relu"), Prologue("xielu", parameters=(0.4, -0.3, 0.5, -1e-6))]


@loop_over("dtype", [torch.float32, torch.bfloat16, torch.float16])
@loop_over("rows", [1, 2, 16, 70])
@loop_over("with_bias", [True, False])
def test_linear(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    weight, residual = torch.randn(40, 24, dtype=dtype), torch.randn(rows, 40, dtype=dtype)
    bias = torch.randn(40, dtype=dtype) if with_bias else None
    for prologue in prologues(24, dtype):
        x = torch.randn(rows, 48 if prologue.kind.endswith(GATED_SUFFIX) else 24, dtype=dtype)
        before = x.clone()
        fast, slow = (kernels.make_linear(weight, bias, prologue) for kernels in (TORCH, REFERENCE))
        assert fast(x).dtype == dtype
        assert_close(fast(x), slow(x), dtype)
        assert_close(fast(x, residual.clone()), slow(x, residual.clone()), dtype)
        assert torch.equal(x, before), "the input is left alone"


def test_linear_of_rows_that_are_not_contiguous() -> None:
    weight, x = torch.randn(6, 4), torch.randn(5, 9)
    assert_close(TORCH.make_linear(weight, None, NO_PROLOGUE)(x[:, 2:6]), x[:, 2:6] @ weight.t())


@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_prologues(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 32, dtype=dtype)
    for prologue in prologues(32, dtype)[1:]:
        assert_close(torch_ops.make_prologue(prologue)(x), reference.apply_prologue(x, prologue), dtype)


@loop_over("dtype", [torch.float32, torch.bfloat16])
def test_rotation(dtype: torch.dtype) -> None:
    x, positions = torch.randn(3, 5, 64, dtype=dtype), torch.tensor([0, 7, 299])
    step = RotaryStep(positions, rotary_table(RopeConfig(), 64, 300, CPU))
    expected = reference.rotate(x, positions, step.cos_sin_cache)
    assert_close(torch_ops.rotate(x, *step.rows), expected, dtype)
