"""Keys that sequences read from the same blocks are computed once, with the same bits as for each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.attention import AttentionShape
from chairlift.kernels.cpu import load
from chairlift.kernels.cpu.attention import NativeAttention
from chairlift.kernels.kernel_set import KernelsUnavailableError
from chairlift.models.declaration.attention_spec import RopeConfig
from chairlift.models.rotary import RotaryTable
from chairlift.kernels.attention import RotaryStep
from support.native import ATTENTION_ISAS, LOOP_ISAS, selected_isa
from support.packed_steps import Step, Tables, pack

try:
    NATIVE = load()
except KernelsUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("isa", "same_threads")

CPU = torch.device("cpu")
MAX_POSITION = 2048


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
        num_own: the keys after the shared ones, at least as many as the tokens of the step.
        num_queries: the tokens of the step.
    """

    parent: int
    num_shared: int
    num_own: int
    num_queries: int = 1


def pack_tree(branches: list[Branch], block_size: int) -> Step:
    """A step whose block tables are a tree. The first sequence shares nothing."""
    tables, work = Tables(8000 // block_size + 100, block_size), []
    lengths: list[int] = []
    for index, branch in enumerate(branches):
        num_shared = 0
        if index:
            parent = branch.parent % index
            # The blocks of the tokens of a step are written by one sequence.
            seen = lengths[parent] - branches[parent].num_queries
            num_blocks = min(branch.num_shared, seen) // block_size
            tables.tables[index] = tables.tables[parent][:num_blocks]
            num_shared = num_blocks * block_size
        lengths.append(num_shared + branch.num_own)
        tables.grow(index, lengths[-1])
        work.append((index, lengths[-1] - branch.num_queries, lengths[-1]))
    return pack(tables, work)


def attend(native: NativeAttention, step: Step, window: int | None, num_threads: int, *, shares: bool) -> torch.Tensor:
    """The outputs of a step with random inputs over random K and V, which are the same in each call."""
    NATIVE.set_num_threads(num_threads)
    NATIVE.set_shares_keys(shares)
    shape, generator = native.shape, torch.Generator().manual_seed(5)
    num_blocks = int(step.metadata.block_tables.max()) + 1
    cache = native.allocate(num_blocks, step.metadata.block_size)
    for part in cache:
        if part is not None and part.dtype == torch.int8:
            part.random_(-127, 128, generator=generator)
        elif part is not None:
            part.copy_(torch.rand(part.shape, generator=generator) * 0.03 if cache.key_scale is not None and part.ndim == 3 else torch.randn(part.shape, generator=generator))
    qkv = torch.randn(len(step.positions), (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, generator=generator)
    table = RotaryTable(RopeConfig(), shape.head_dim, MAX_POSITION, CPU)
    table.extend(MAX_POSITION)
    rotary = RotaryStep(step.positions, table.values, table.query_scales)
    sinks = torch.linspace(-2, 2, shape.num_heads)
    plan = native.plan(step.metadata)
    assert any(plan.step.shared_keys) <= shares
    return native.forward(qkv, rotary, cache, plan, window, None, sinks).clone()


BRANCHES = st.builds(
    Branch,
    parent=st.integers(0, 7),
    num_shared=st.sampled_from((0, 63, 64, 200, 512, 600, 1024, 1100)),
    num_own=st.integers(20, 300),
    num_queries=st.sampled_from((1, 1, 1, 2, 20)),
)


@pytest.mark.parametrize(
    ("isa", "kv_dtype"),
    [
        *((isa, torch.float32) for isa in LOOP_ISAS),
        *((isa, dtype) for isa in ATTENTION_ISAS for dtype in (torch.bfloat16, torch.int8)),
    ],
    indirect=["isa"],
    scope="module",
)
def test_sharing_changes_no_bit(kv_dtype: torch.dtype) -> None:
    shared = []

    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(
        root=st.builds(Branch, st.just(0), st.just(0), st.integers(600, 1300)),
        branches=st.lists(BRANCHES, min_size=1, max_size=8),
        heads=st.sampled_from(((3, 1), (4, 2), (6, 3), (18, 1), (2, 2))),
        head_dim=st.sampled_from((12, 32, 64)),
        block_size=st.sampled_from((1, 16, 24, 70)),
        window=st.sampled_from((None, None, 100, 4000)),
        soft_cap=st.sampled_from((None, None, 2.0)),
        num_threads=st.integers(1, 3),
    )
    def check(root, branches, heads, head_dim, block_size, window, soft_cap, num_threads) -> None:
        shape = AttentionShape(*heads, head_dim, head_dim**-0.5, torch.float32, CPU, kv_dtype, soft_cap)
        native, step = NativeAttention(shape), pack_tree([root, *branches], block_size)
        alone = attend(native, step, window, 1, shares=False)
        assert alone.isfinite().all()
        assert torch.equal(attend(native, step, window, num_threads, shares=True), alone)
        shared.append(max(native.plan(step.metadata).step.shared_keys))

    check()
    assert any(shared), "no example shares keys"
