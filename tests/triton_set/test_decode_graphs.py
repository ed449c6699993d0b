"""Replayed attention has the bits of attention for contexts of any length, in one split or several.

On the CPU a capture records operations and launches with their numbers, and a replay repeats them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from chairlift.kernels.attention import AttentionMetadata
from chairlift.kernels.graph_sizes import graph_sizes
from chairlift.kernels.triton import attention
from chairlift.kernels.triton.attention import TritonAttention
from chairlift.worker.decode_graphs import CAPTURING, CudaCapture, DecodeGraph, DecodeGraphs
from chairlift.worker.request_rows import RequestRows
from support.case_loop import loop_over
from support.packed_steps import Tables, pack
from support.recorded_capture import RecordedCapture
from triton_set.test_attention import llama, random_cache

ROW_BYTES = 4 * 2 * (16 + 2)
"""The sums of a row of a split."""


class AttentionModel:
    """A `CapturedModel` of one layer of attention over memory of random values."""

    num_allocations = 1

    def __init__(self, tables: Tables, window: int | None) -> None:
        self.backend, self.window = TritonAttention(llama()), window
        self.cache = random_cache(self.backend, tables)
        self.table = torch.randn(50, 8 * 16)

    def plan(self, *metadata: AttentionMetadata, states: Any = None) -> Any:
        return SimpleNamespace(attention=(self.backend.plan(metadata[0]),))

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        qkv = self.table[token_ids] + positions[:, None] / 1000
        return self.backend.forward(qkv, None, self.cache, plan.attention[0], self.window, None, torch.ones(4))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


@loop_over(("window", "max_rows"), [(700, attention.MAX_SPLIT_BYTES // ROW_BYTES), (None, 8)])
def test_replays_have_the_bits_of_steps(window: int | None, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "MAX_SPLIT_BYTES", max_rows * ROW_BYTES)
    torch.manual_seed(0)
    tables = Tables(300, 16)
    model, rows = AttentionModel(tables, window), RequestRows(3, 1600, 16, torch.device("cpu"))
    with torch.inference_mode():
        graphs = DecodeGraphs(model, rows, False, RecordedCapture())
        for lengths in ([3], [1500], [600, 2], [1, 512, 513], [1600, 9, 1030]):
            step = pack(tables, [(sequence, length - 1, length) for sequence, length in enumerate(lengths)])
            token_ids = torch.randint(50, (len(lengths),))
            expected = model.forward(token_ids, step.positions, model.plan(step.metadata))
            plan = graphs.plan(step.metadata)
            num_rows = sum(2 * -(-length // 512) for length in lengths)
            assert isinstance(plan, DecodeGraph) == (num_rows <= max_rows), "the scratch memory of splits"
            assert torch.equal(graphs.forward(token_ids, step.positions, plan), expected)


def test_steps_with_prompts_are_not_replayed() -> None:
    tables = Tables(10, 16)
    model, rows = AttentionModel(tables, None), RequestRows(2, 64, 16, torch.device("cpu"))
    with torch.inference_mode():
        graphs = DecodeGraphs(model, rows, False, RecordedCapture())
        assert not isinstance(graphs.plan(pack(tables, [(0, 4, 5), (1, 0, 2)]).metadata), DecodeGraph)


def test_nothing_is_replayed_in_memory_that_was_allocated_again() -> None:
    tables = Tables(10, 16)
    model, rows = AttentionModel(tables, None), RequestRows(1, 64, 16, torch.device("cpu"))
    with torch.inference_mode():
        graphs = DecodeGraphs(model, rows, False, RecordedCapture())
        step = pack(tables, [(0, 4, 5)])
        assert isinstance(graphs.plan(step.metadata), DecodeGraph)
        model.num_allocations += 1
        assert not isinstance(graphs.plan(step.metadata), DecodeGraph)


WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x[0]),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(as_tuple=True),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "tensor": lambda x: x + torch.tensor([1]),
    "from_numpy": lambda x: x + torch.from_numpy(np.zeros(3)),
}


@loop_over("name", list(WAITING))
def test_what_waits_for_the_host_cannot_be_recorded(name: str) -> None:
    x = torch.tensor([1, 2, 0])
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"waits for the device|copies between host"):
        RecordedCapture()(lambda: torch.zeros(1) * bool(WAITING[name](x) is None))


def test_warm_up_and_capture_have_one_stream_which_is_left_when_the_capture_fails() -> None:
    entered: list[object] = []

    @contextmanager
    def enter(what: object, *_: object, **__: object) -> Iterator[None]:
        entered.append(what)
        try:
            yield
        finally:
            entered.pop()

    @contextmanager
    def graph(_: object, pool: object, stream: object, **__: object) -> Iterator[None]:
        assert entered[-1] is stream
        yield
        raise RuntimeError("the capture failed")

    def compute() -> torch.Tensor:
        computed.append(entered[-1])
        return torch.zeros(1)

    computed: list[object] = []
    with patch.object(torch, "cuda") as cuda:
        cuda.stream, cuda.device, cuda.graph = enter, enter, graph
        with pytest.raises(RuntimeError, match="the capture failed"):
            CudaCapture(torch.device("cuda:1"))(compute)
        assert computed == [cuda.Stream.return_value] * 2
        cuda.Stream.assert_called_once_with(torch.device("cuda:1"))
    assert not entered
    assert not CAPTURING.locked()


@pytest.mark.parametrize("count", [1, 3, 8, 9, 20, 256])
def test_the_sizes_of_graphs_are_few_and_end_with_all_rows(count: int) -> None:
    sizes = graph_sizes(count)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == count
    assert all(after <= max(2 * size, size + 16) for size, after in pairwise(sizes))
