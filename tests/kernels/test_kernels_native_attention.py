"""Native attention equals the reference for any shape, and has the same bits for any division of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.kernels.attention import AttentionMetadata, AttentionShape, KVCache, QKNorm, RotaryStep
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.attention import NativeAttention
from chairlift.kernels.cpu.tape import record_calls
from chairlift.kernels.kernel_set import KernelsUnavailableError
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.rotary import RotaryTable
from support import reference_kernels as reference
from support.case_loop import loop_over
from support.native import ATTENTION_ISAS, LOOP_ISAS, ROUNDING_TO_BF16, selected_isa
from support.packed_steps import Tables, pack

try:
    NATIVE = load()
except KernelsUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("isa", "same_threads")

CPU = torch.device("cpu")
MAX_POSITION = 2048
with_all_kv_dtypes = pytest.mark.parametrize(
    ("isa", "kv_dtype"),
    [
        *((isa, torch.float32) for isa in LOOP_ISAS),
        *((isa, dtype) for isa in ATTENTION_ISAS for dtype in (torch.bfloat16, torch.int8)),
    ],
    indirect=["isa"],
    scope="module",
)
WORK = [(0, 31, 32), (1, 0, 133), (2, 7, 8), (3, 15, 31), (4, 0, 1), (5, 1099, 1100), (6, 500, 530)]
"""Decode, prefill and chunk rows mixed; sequences end before, at and after boundaries of blocks, tiles and splits."""


@pytest.fixture(params=ATTENTION_ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with selected_isa(request.param) as name:
        yield name


def make_shape(
    heads: tuple[int, int], head_dim: int, kv_dtype: torch.dtype, soft_cap: float | None = None
) -> AttentionShape:
    return AttentionShape(*heads, head_dim, head_dim**-0.5, torch.float32, CPU, kv_dtype, soft_cap)


def poisoned(cache: KVCache) -> KVCache:
    """KV memory whose unwritten slots are NaN, so that reading one changes the output."""
    for part in cache:
        if part is not None:
            part.fill_(77 if part.dtype == torch.int8 else torch.nan)
    return cache


def fill(cache: KVCache) -> KVCache:
    """Memory full of values, of moderate size also in int8."""
    cache.key.random_(-127, 128) if cache.key_scale is not None else cache.key.normal_()
    cache.value.random_(-127, 128) if cache.value_scale is not None else cache.value.normal_()
    for scale in (cache.key_scale, cache.value_scale):
        if scale is not None:
            scale.uniform_(0.005, 0.03)
    return cache


def copy_of(cache: KVCache) -> KVCache:
    return KVCache(*(None if part is None else part.clone() for part in cache))


@cache
def rotary_table(head_dim: int, rope: RopeConfig) -> RotaryTable:
    table = RotaryTable(rope, head_dim, MAX_POSITION, CPU)
    table.extend(MAX_POSITION)
    return table


def rotary_at(positions: torch.Tensor, head_dim: int, rope: RopeConfig | None = None) -> RotaryStep:
    table = rotary_table(head_dim, rope or RopeConfig())
    return RotaryStep(positions, table.values, table.query_scales)


def assert_same_memory(actual: KVCache, expected: KVCache, *, norms_values: bool = False) -> None:
    """Rotary embedding and norms round in another order, so values may differ by one step of the type of the memory."""
    if actual.key.dtype == torch.int8:
        assert (actual.key.int() - expected.key.int()).abs().max() <= 1
        assert (actual.value.int() - expected.value.int()).abs().max() <= 1
        torch.testing.assert_close(actual.key_scale, expected.key_scale, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(actual.value_scale, expected.value_scale, rtol=1e-6, atol=0)
        return
    rtol = 2**-7 if actual.key.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.key, expected.key, rtol=rtol, atol=1e-5)
    if norms_values:
        torch.testing.assert_close(actual.value, expected.value, rtol=rtol, atol=1e-5)
    else:
        assert torch.equal(actual.value, expected.value)


def uses_tiles(shape: AttentionShape) -> bool:
    """Whether products have operands in bfloat16."""
    return NATIVE.isa() in ROUNDING_TO_BF16 and shape.kv_cache_dtype != torch.float32


def assert_within_bf16(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    shape: AttentionShape,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """Compare with the reference for rounded queries.

    Rounding changes a weight by at most 2**-8 of its value, and so an output by at most 2**-8 of the weighted mean of
    the magnitudes of values.
    """
    rounded = (query * shape.scale).bfloat16().float() / shape.scale
    attend = partial(reference.paged_attention, rounded, logits_soft_cap=shape.logits_soft_cap, sinks=sinks)
    expected = attend(cache, metadata, shape.scale, window).flatten(1)
    magnitudes = cache._replace(value=cache.value.abs())
    mean = attend(magnitudes, metadata, shape.scale, window).flatten(1)
    assert ((out - expected).abs() <= 2**-8 * mean + 2e-5).all()


def check_step(
    shape: AttentionShape,
    tables: Tables,
    work: Sequence[tuple[int, int, int]],
    window: int | None,
    *,
    num_padding: int = 0,
    with_rotary: bool = True,
    rope: RopeConfig | None = None,
    qk_norm: QKNorm | None = None,
    kv_projections: int = 2,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compare one step with the reference: first the written K and V, then attention over the same memory."""
    step = pack(tables, work, num_padding)
    native = NativeAttention(shape)
    cache = fill(native.allocate(tables.num_blocks, tables.block_size))
    kept = copy_of(cache)
    width = (shape.num_heads + kv_projections * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(len(step.positions), width)
    rotary = rotary_at(step.positions, shape.head_dim, rope) if with_rotary else None
    out = native.forward(qkv.clone(), rotary, cache, native.plan(step.metadata), window, qk_norm, sinks)

    query, key, value = reference.prepare_heads(shape.split(qkv), qk_norm, rotary)
    if key is not None and value is not None:
        reference.write_kv(key, value, kept, step.metadata.slot_mapping)
    assert_same_memory(cache, kept, norms_values=qk_norm is not None and qk_norm.norms_values)
    if uses_tiles(shape):
        assert_within_bf16(out, query, cache, step.metadata, shape, window, sinks)
    else:
        expected = reference.paged_attention(
            query, cache, step.metadata, shape.scale, window, shape.logits_soft_cap, sinks
        ).flatten(1)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-5)
    return out


SHAPES = [((9, 3), 64, 16), ((4, 4), 24, 3), ((8, 2), 40, 32), ((7, 1), 80, 16), ((3, 3), 16, 1), ((8, 2), 128, 16)]


@with_all_kv_dtypes
@loop_over(("heads", "head_dim", "block_size"), [*SHAPES, ((6, 2), 4, 5)])
def test_attention_over_shapes(heads: tuple[int, int], head_dim: int, block_size: int, kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    NATIVE.set_num_threads(2)
    shape = make_shape(heads, head_dim, kv_dtype)
    check_step(shape, Tables(2000 // block_size + 8, block_size), WORK, None)


SCALED_QUERIES = RopeConfig(query_scaling_beta=0.9, original_max_position_embeddings=20)
VARIANTS: list[tuple[int, int | None, float | None, RopeConfig | None]] = [
    *((32, window, None, None) for window in (1, 5, 64, 100, 700, 5000)),
    *((head_dim, None, soft_cap, None) for head_dim in (40, 256) for soft_cap in (0.3, 50.0)),
    *((64, None, None, RopeConfig(rotary_dim=rotary_dim)) for rotary_dim in (2, 34, 48)),
    (24, None, None, SCALED_QUERIES),
]
"""The size of a head, the window, the soft cap and the rotation."""


@with_all_kv_dtypes
@loop_over(("head_dim", "window", "soft_cap", "rope"), VARIANTS)
def test_windows_soft_caps_and_rotations(
    head_dim: int, window: int | None, soft_cap: float | None, rope: RopeConfig | None, kv_dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    check_step(make_shape((4, 2), head_dim, kv_dtype, soft_cap), Tables(300, 8), WORK, window, rope=rope)


@with_all_kv_dtypes
@loop_over(("window", "num_threads"), [(None, 1), (None, 3), (5, 2), (600, 2)])
def test_sinks(window: int | None, num_threads: int, kv_dtype: torch.dtype) -> None:
    """The sink of a head is counted once, also where threads compute the splits of a row."""
    torch.manual_seed(0)
    NATIVE.set_num_threads(num_threads)
    check_step(make_shape((6, 2), 32, kv_dtype), Tables(300, 8), WORK, window, sinks=torch.randn(6) * 3)


@with_all_kv_dtypes
def test_a_sink_above_all_scores_takes_the_whole_weight(kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sinks = torch.tensor([-1e4, 1e4, 0.0, 1e30])
    out = check_step(make_shape((4, 2), 32, kv_dtype), Tables(300, 8), WORK, None, sinks=sinks).view(-1, 4, 32)
    assert out[:, [1, 3]].abs().max() < 1e-30
    assert out[:, [0, 2]].abs().amax((1, 2)).min() > 0.01


def test_a_negative_soft_cap_is_an_error() -> None:
    with pytest.raises(ValueError, match="soft_cap must be 0 or a positive number, got -1"):
        NativeAttention(make_shape((4, 2), 8, torch.float32, -1.0))


@with_all_kv_dtypes
def test_query_and_key_norm(kv_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for follows, with_rotary in product((False, True), repeat=2):
        norm = QKNorm(torch.rand(40) + 0.5, torch.rand(40) + 0.5, 1e-6, follows_rotation=follows)
        shape = make_shape((4, 2), 40, kv_dtype)
        check_step(shape, Tables(200, 16), WORK, None, qk_norm=norm, with_rotary=with_rotary)


@with_all_kv_dtypes
@loop_over("kv_projections", [0, 1, 2])
def test_norms_of_values_and_layers_without_projections(kv_projections: int, kv_dtype: torch.dtype) -> None:
    """Without projections of K and V the layer reads the memory of this step's tokens, which it does not write."""
    torch.manual_seed(0)
    query, key = torch.rand(2, 40) + 0.5
    norm = QKNorm(query, key if kv_projections else None, 1e-6, norms_values=True)
    check_step(make_shape((4, 2), 40, kv_dtype), Tables(200, 16), WORK, 30, qk_norm=norm, kv_projections=kv_projections)


@with_all_kv_dtypes
def test_tiles_round_queries_to_bfloat16(kv_dtype: torch.dtype) -> None:
    """Queries that differ only in lower bits have the same outputs where products use tiles, and only there."""
    torch.manual_seed(0)
    shape = make_shape((4, 2), 64, kv_dtype)
    step = pack(Tables(64, 16), [(0, 99, 100), (1, 30, 80)])
    native = NativeAttention(shape)
    cache = fill(native.allocate(64, 16))
    qkv = torch.randn(51, 512).bfloat16().float()
    changed = qkv.clone()
    changed[:, :256] *= 1 + 2**-11
    plan = native.plan(step.metadata)
    outputs = [native.forward(x, None, cache, plan, None, None).clone() for x in (qkv, changed)]
    assert torch.equal(*outputs) == uses_tiles(shape)


@loop_over("num_padding", [0, 1, 5])
def test_padding_reads_and_writes_nothing(num_padding: int) -> None:
    """The results of rows before their sequence are zero, and no slot changes."""
    torch.manual_seed(0)
    tables = Tables(8, 4)
    tables.grow(0, 1)
    out = check_step(
        make_shape((4, 2), 8, torch.float32), tables, [(0, 0, 0), (1, 4, 6)], None, num_padding=num_padding
    )
    assert torch.equal(out[:num_padding], torch.zeros(num_padding, 32))


@given(data=st.data(), block_size=st.sampled_from((1, 3, 8)), window=st.sampled_from((None, 1, 6)))
@settings(max_examples=25, deadline=None)
def test_any_step(data: st.DataObject, block_size: int, window: int | None) -> None:
    spans = st.tuples(st.integers(0, 20), st.integers(1, 12))
    drawn = data.draw(st.lists(spans, min_size=1, max_size=6))
    work = [(i, start, start + count) for i, (start, count) in enumerate(drawn)]
    padding = data.draw(st.integers(0, 3)) if work[0][1] == 0 else 0
    group, kv_heads = data.draw(st.sampled_from((1, 3, 4, 7))), data.draw(st.sampled_from((1, 2)))
    shape = make_shape((group * kv_heads, kv_heads), data.draw(st.sampled_from((8, 20))), torch.float32)
    check_step(shape, Tables(200, block_size), work, window, num_padding=padding)


@dataclass(frozen=True)
class Way:
    """A way to compute a sequence, which must not change a bit of its outputs.

    Attributes:
        chunk: tokens a step.
        num_others: other sequences that decode in each step.
    """

    chunk: int = 1
    block_size: int = 16
    num_others: int = 0
    num_threads: int = 1
    tile_order: int = 0


def compute(
    shape: AttentionShape, qkv: torch.Tensor, window: int | None, way: Way, bounds: Sequence[int] | None = None
) -> torch.Tensor:
    """The outputs of a sequence with the inputs [tokens, width], starting from empty memory. Heads have sinks.

    Args:
        bounds: the first token of each step and the number of all tokens, instead of steps of `way.chunk` tokens.
    """
    sinks = torch.linspace(-2, 2, shape.num_heads)
    NATIVE.set_num_threads(way.num_threads)
    NATIVE.set_tile_order(way.tile_order)
    native = NativeAttention(shape)
    tables = Tables(-(-len(qkv) // way.block_size) + way.num_others * -(-len(qkv) // way.block_size), way.block_size)
    cache = poisoned(native.allocate(tables.num_blocks, way.block_size))
    outputs, other_inputs = [], torch.randn(way.num_others, qkv.shape[1])
    for number, (start, stop) in enumerate(pairwise(bounds or [*range(0, len(qkv), way.chunk), len(qkv)])):
        others = [(1 + other, number, number + 1) for other in range(way.num_others)]
        at = number % (way.num_others + 1)
        step = pack(tables, [*others[:at], (0, start, stop), *others[at:]])
        inputs = torch.cat((other_inputs[:at], qkv[start:stop], other_inputs[at:]))
        out = native.forward(
            inputs, rotary_at(step.positions, shape.head_dim), cache, native.plan(step.metadata), window, None, sinks
        )
        outputs.append(out[at : at + stop - start].clone())
    return torch.cat(outputs)


WAYS = st.builds(
    Way,
    chunk=st.sampled_from((7, 64, 100, 513, 1200)),
    block_size=st.sampled_from((1, 3, 16, 32)),
    num_others=st.sampled_from((0, 1, 5)),
    num_threads=st.integers(1, 4),
    tile_order=st.integers(0, 1000),
)


@with_all_kv_dtypes
@loop_over(("heads", "head_dim", "window"), [((3, 1), 16, None), ((4, 2), 64, None), ((2, 2), 12, 90)])
def test_division_threads_and_order_change_no_bit(
    heads: tuple[int, int], head_dim: int, window: int | None, kv_dtype: torch.dtype
) -> None:
    """600 tokens are two splits and ten tiles. Around the ends of the first tile and of the first split, the expected
    outputs are computed one by one. Unwritten memory is NaN."""
    shape = make_shape(heads, head_dim, kv_dtype)
    torch.manual_seed(0)
    qkv = torch.randn(600, (heads[0] + 2 * heads[1]) * head_dim)
    expected = compute(shape, qkv, window, Way(), [*range(70), *range(500, 601)])
    assert expected.isfinite().all()

    @settings(max_examples=4, deadline=None, derandomize=True)
    @given(way=WAYS)
    def check(way: Way) -> None:
        assert torch.equal(compute(shape, qkv, window, way), expected)

    check()


def test_a_single_long_sequence_is_divided_at_splits() -> None:
    """The splits of one token over 1900 keys run on different threads, and are merged in the same order as on one."""
    torch.manual_seed(0)
    shape, tables, qkv = make_shape((6, 2), 16, torch.bfloat16), Tables(119, 16), torch.randn(1900, 160)
    native = NativeAttention(shape)
    cache, sinks = poisoned(native.allocate(119, 16)), torch.linspace(-2, 2, 6)

    def last_row(start: int, num_threads: int, order: int) -> torch.Tensor:
        """The output of the last token, in a step that computes all tokens from `start`."""
        NATIVE.set_num_threads(num_threads)
        NATIVE.set_tile_order(order)
        step = pack(tables, [(0, start, 1900)])
        rotary, plan = rotary_at(step.positions, 16), native.plan(step.metadata)
        return native.forward(qkv[start:].clone(), rotary, cache, plan, None, None, sinks)[-1].clone()

    expected = last_row(0, 1, 0)
    for num_threads in (1, 2, 3, 4):
        for order in (0, 3, 11):
            assert torch.equal(last_row(1899, num_threads, order), expected)


def test_a_plan_serves_layers_of_several_windows() -> None:
    torch.manual_seed(0)
    NATIVE.set_num_threads(2)
    shape = make_shape((2, 1), 8, torch.float32)
    step = pack(Tables(64, 4), [(0, 40, 41), (1, 3, 4), (2, 10, 30)])
    native = NativeAttention(shape)
    plan = native.plan(step.metadata)
    for window in (4, None, 4, 9, None):
        cache = fill(native.allocate(64, 4))
        qkv = torch.randn(22, 32)
        out = native.forward(qkv.clone(), None, cache, plan, window, None)
        expected = reference.paged_attention(shape.split(qkv)[0], cache, step.metadata, shape.scale, window)
        torch.testing.assert_close(out, expected.flatten(1), rtol=1e-4, atol=1e-5)


def test_a_tape_knows_the_steps_of_its_calls() -> None:
    """Two shapes of heads have a plan each; a replay with the plans of another step computes that step."""
    torch.manual_seed(0)
    tables, backends = (
        Tables(64, 4),
        [NativeAttention(make_shape(heads, 8, torch.float32)) for heads in ((2, 1), (4, 2))],
    )
    caches = [fill(backend.allocate(64, 4)) for backend in backends]
    inputs = [torch.randn(2, (backend.shape.num_heads * 2) * 8) for backend in backends]
    steps = [pack(tables, work).metadata for work in ([(0, 9, 10), (1, 3, 4)], [(0, 10, 11), (1, 4, 5)])]
    tape = NATIVE.Tape()

    def forward(metadata: AttentionMetadata, *, records: bool) -> list[torch.Tensor]:
        plans = [backend.plan(metadata) for backend in backends]
        with record_calls(tape, [plan.step for plan in plans]) if records else nullcontext():
            calls = zip(backends, inputs, caches, plans, strict=True)
            return [backend.forward(x, None, cache, plan, None, None) for backend, x, cache, plan in calls]

    outputs = forward(steps[0], records=True)
    expected = [out.clone() for out in forward(steps[1], records=False)]
    plans = [backend.plan(steps[1]) for backend in backends]
    for out in outputs:
        out.zero_()
    tape.replay([plan.step for plan in plans], 0)
    assert all(map(torch.equal, outputs, expected))
    with pytest.raises(ValueError, match="steps must have 2 items, as recorded, got 1"):
        tape.replay([plans[0].step], 0)
    with record_calls(NATIVE.Tape()), pytest.raises(ValueError, match=r"step must be one of those that Tape\.start"):
        backends[0].forward(inputs[0], None, caches[0], plans[0], None, None)


def test_unsupported_shapes_and_types_are_rejected() -> None:
    shape = make_shape((2, 1), 8, torch.float32)
    with pytest.raises(ConfigError, match=r"head_dim must be a multiple of 4 and at most 576 .* got 6"):
        NativeAttention(replace(shape, head_dim=6))
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of float32, bfloat16, int8"):
        NativeAttention(replace(shape, kv_cache_dtype=torch.float16))
    with pytest.raises(ConfigError, match=r"native kernels compute in float32 on the CPU, got torch\.bfloat16"):
        NativeAttention(replace(shape, dtype=torch.bfloat16))


def test_arrays_of_a_step_that_do_not_fit_are_rejected() -> None:
    metadata = pack(Tables(64, 4), [(0, 40, 41), (1, 3, 4)]).metadata
    native = NativeAttention(make_shape((2, 1), 8, torch.float32))
    with pytest.raises(ValueError, match="AttentionStep: seq_lens must fit into the block tables"):
        native.plan(replace(metadata, seq_lens=metadata.seq_lens + 4))
