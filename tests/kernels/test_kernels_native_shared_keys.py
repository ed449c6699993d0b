"""Keys that sequences read from the same blocks are computed once, with the same bits as for each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.attention import AttentionShape, KVCache, RotaryStep
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.attention import NativeAttention
from chairlift.kernels.kernel_set import KernelsUnavailableError
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.rotary import RotaryTable
from support.native import ATTENTION_ISAS, LOOP_ISAS, selected_isa
from support.packed_steps import Step, Tables, pack

try:
    NATIVE = load()
except KernelsUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("isa", "same_threads")

CPU = torch.device("cpu")
MAX_POSITION = 2800
SPLIT = 512
KV_DTYPES = [
    *((isa, torch.float32) for isa in LOOP_ISAS),
    *((isa, dtype) for isa in ATTENTION_ISAS for dtype in (torch.bfloat16, torch.int8)),
]


@pytest.fixture(params=ATTENTION_ISAS, scope="module")
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with selected_isa(request.param) as name:
        yield name


@pytest.fixture(autouse=True)
def restore_sharing() -> Iterator[None]:
    yield
    NATIVE.set_shares_keys(True)


@dataclass(frozen=True)
class Branch:
    """A sequence whose first `num_shared` keys, rounded down to blocks, are in the blocks of an earlier one.

    Attributes:
        parent: the index of the earlier sequence, modulo their number.
        num_own: the number of keys after the shared ones, at least that of the tokens of the step.
        num_queries: the number of tokens of the step.
    """

    parent: int
    num_shared: int
    num_own: int
    num_queries: int = 1


def pack_tree(branches: list[Branch], block_size: int) -> Step:
    """A step whose block tables are a tree: any sequence but the first begins with the blocks of an earlier one, except
    those that the step writes."""
    tables = Tables(12_000 // block_size + 100, block_size)
    work: list[tuple[int, int, int]] = []
    for index, branch in enumerate(branches):
        _, seen, _ = work[branch.parent % index] if index else (0, 0, 0)
        num_blocks = min(branch.num_shared, seen) // block_size
        tables.tables[index] = tables.tables[branch.parent % index][:num_blocks] if index else []
        length = num_blocks * block_size + branch.num_own
        tables.grow(index, length)
        work.append((index, length - branch.num_queries, length))
    return pack(tables, work)


def shared_keys(branches: list[Branch], block_size: int) -> list[int]:
    """The keys that each sequence computes with others."""
    shape = AttentionShape(2, 1, 8, 1.0, torch.float32, CPU, torch.float32)
    return NativeAttention(shape).plan(pack_tree(branches, block_size).metadata).step.shared_keys


def filled_cache(native: NativeAttention, step: Step, generator: torch.Generator) -> KVCache:
    cache = native.allocate(int(step.metadata.block_tables.max()) + 1, step.metadata.block_size)
    for values in {cache.key, cache.value}:
        if values.dtype == torch.int8:
            values.random_(-127, 128, generator=generator)
        else:
            values.copy_(torch.randn(values.shape, generator=generator))
    for scales in (cache.key_scale, cache.value_scale):
        if scales is not None:
            scales.uniform_(0.005, 0.03, generator=generator)
    return cache


def attend(
    native: NativeAttention, step: Step, window: int | None, num_threads: int, *, shares: bool, most: int = 1 << 25
) -> torch.Tensor:
    """The outputs of a step. Inputs, K and V are the same in each call."""
    NATIVE.set_num_threads(num_threads)
    NATIVE.set_shares_keys(shares, most)
    shape, generator = native.shape, torch.Generator().manual_seed(5)
    cache = filled_cache(native, step, generator)
    num_values = 1 if shape.keys_are_values else 2
    width = (shape.num_heads + num_values * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(len(step.positions), width, generator=generator)
    table = RotaryTable(RopeConfig(), shape.head_dim, MAX_POSITION, CPU)
    table.extend(MAX_POSITION)
    rotary, sinks = RotaryStep(step.positions, table.values, table.query_scales), torch.linspace(-2, 2, shape.num_heads)
    plan = native.plan(step.metadata)
    assert shares or not any(plan.step.shared_keys)
    return native.forward(qkv, rotary, cache, plan, window, None, sinks).clone()


BRANCHES = st.builds(
    Branch,
    parent=st.sampled_from((0, 0, 1, 2, 5)),
    num_shared=st.sampled_from((600, 1100, 640, 1024, 512, 200, 0)),
    num_own=st.integers(20, 300),
    num_queries=st.sampled_from((1, 1, 1, 2, 8, 20)),
)


@pytest.mark.parametrize(("isa", "kv_dtype"), KV_DTYPES, indirect=["isa"], scope="module")
def test_sharing_changes_no_bit(kv_dtype: torch.dtype) -> None:
    shared: list[int] = []

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(
        root=st.builds(Branch, st.just(0), st.just(0), st.integers(1100, 1300)),
        branches=st.lists(BRANCHES, min_size=2, max_size=8),
        heads=st.sampled_from(((3, 1), (4, 2), (6, 3), (18, 1), (2, 2))),
        head_dim=st.sampled_from((12, 32, 64)),
        block_size=st.sampled_from((1, 16, 24, 70)),
        window=st.sampled_from((None, None, 100, 4000)),
        soft_cap=st.sampled_from((None, None, 2.0)),
        num_threads=st.integers(1, 3),
        most=st.sampled_from((1, 10_000, 100_000)),
    )
    def check(
        root: Branch,
        branches: list[Branch],
        heads: tuple[int, int],
        head_dim: int,
        block_size: int,
        window: int | None,
        soft_cap: float | None,
        num_threads: int,
        most: int,
    ) -> None:
        shape = AttentionShape(*heads, head_dim, head_dim**-0.5, torch.float32, CPU, kv_dtype, soft_cap)
        native, step = NativeAttention(shape), pack_tree([root, *branches], block_size)
        alone = attend(native, step, window, 1, shares=False)
        assert alone.isfinite().all()
        assert torch.equal(attend(native, step, window, num_threads, shares=True), alone)
        assert torch.equal(attend(native, step, window, num_threads, shares=True, most=most), alone)
        shared.append(max(native.plan(step.metadata).step.shared_keys))

    check()
    assert any(count > SPLIT for count in shared)
    assert any(count % SPLIT for count in shared)


@pytest.mark.parametrize(("isa", "kv_dtype"), KV_DTYPES, indirect=["isa"], scope="module")
def test_latent_attention_shares_keys_with_the_same_bits(kv_dtype: torch.dtype) -> None:
    shape = AttentionShape(4, 1, 576, 576**-0.5, torch.float32, CPU, kv_dtype, keys_are_values=True)
    step = pack_tree([Branch(0, 0, 700), Branch(0, 640, 30), Branch(0, 600, 9, 2)], 16)
    native = NativeAttention(shape)
    assert native.plan(step.metadata).step.shared_keys == [640, 640, 512]
    assert torch.equal(attend(native, step, None, 2, shares=True), attend(native, step, None, 1, shares=False))


def test_a_prefix_is_shared_up_to_the_first_other_block() -> None:
    """Shared keys end at a multiple of 64 before the tokens of the step, at least 128 keys after the last split."""
    root, child = Branch(0, 0, 1200), Branch(0, 1170, 50)
    assert shared_keys([root, child], 16) == [1152, 1152]
    assert shared_keys([root, Branch(0, 1140, 50)], 16) == [1024, 1024]
    assert shared_keys([root, Branch(0, 150, 50)], 16) == [128, 128]
    assert shared_keys([root, Branch(0, 127, 50)], 1) == [0, 0]
    assert shared_keys([Branch(0, 0, 700, 8), Branch(0, 700, 8, 8)], 1) == [640, 640]
    assert shared_keys([root, child, Branch(0, 1170, 9, 9)], 16) == [1152, 1152, 0]


def test_prefixes_of_different_lengths_are_shared_by_those_that_have_them() -> None:
    root = Branch(0, 0, 2000)
    assert shared_keys([root, Branch(0, 1670, 50), Branch(0, 800, 50), Branch(0, 700, 50)], 16) == [
        1664,
        1664,
        640,
        640,
    ]
    assert shared_keys([root, Branch(0, 1536, 500), Branch(1, 1900, 50), Branch(0, 0, 900)], 16) == [
        1536,
        1856,
        1856,
        0,
    ]
