"""The swap space, and the copies of blocks to it and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chairlift.core.kv.block_copies import SwapSpace
from chairlift.kernels.attention import KVCache
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request
from chairlift.worker.block_copier import BlockCopier, copy_blocks
from support.fakes import collect, expected_tokens, make_engine, make_request


def copies(space: SwapSpace) -> tuple[dict[int, int], dict[int, int]]:
    output = SchedulerOutput(0, {})
    space.plan_copies(output)
    return output.swapped_out, output.swapped_in


def test_blocks_are_copied_out_once_and_back_to_other_blocks() -> None:
    space = SwapSpace(3)
    assert space.swap_out("a", [7, 5])
    assert copies(space) == ({0: 7, 1: 5}, {})
    assert copies(space) == ({}, {})
    space.swap_in("a", [2, 9, 4], num_cached=1)
    assert copies(space) == ({}, {9: 1})
    assert space.num_used == 0


def test_a_full_swap_space_takes_nothing() -> None:
    space = SwapSpace(3)
    assert space.swap_out("a", [7, 5])
    assert not space.swap_out("b", [1, 2])
    assert space.num_used == 2
    assert "b" not in space


def preempt_one(num_swap_blocks: int) -> tuple[list[Request], Any, dict[str, list[int]]]:
    """Two requests that do not fit together, up to the first preemption."""
    core, _, executor, events = make_engine(num_blocks=6, enable_prefix_caching=False, num_swap_blocks=num_swap_blocks)
    requests = [make_request(name, [index] * 7, max_tokens=9) for index, name in enumerate("ab")]
    answers: dict[str, list[int]] = {}
    for request in requests:
        core.add(request)
    while not any(output.removed for output in executor.outputs):
        collect(core.step(), answers)
    return requests, (core, executor, events), answers


def test_a_swapped_request_computes_no_token_twice() -> None:
    requests, (core, executor, events), answers = preempt_one(8)
    assert requests[1].num_preemptions == 1
    assert requests[1].num_computed_tokens > 7
    while core.has_work:
        collect(core.step(), answers)
    assert answers == {name: expected_tokens([index] * 7, 9) for index, name in enumerate("ab")}
    assert sum(sum(output.num_scheduled_tokens.values()) for output in executor.outputs) == 2 * (7 + 9 - 1)
    steps = [event for event in events.events if event.type == "step"]
    assert [step.swapped for step in steps if step.swapped] == [["b"]]
    assert sum(step.num_recomputed for step in steps) == 0
    assert sum(step.blocks_swapped_out for step in steps) == sum(step.blocks_swapped_in for step in steps) > 0
    assert max(step.swap_blocks for step in steps) == sum(step.blocks_swapped_out for step in steps)


def test_a_full_swap_space_falls_back_to_recomputation() -> None:
    requests, (core, executor, _), answers = preempt_one(1)
    assert requests[1].num_computed_tokens == 0
    while core.has_work:
        collect(core.step(), answers)
    assert answers == {name: expected_tokens([index] * 7, 9) for index, name in enumerate("ab")}
    assert not any(output.swapped_out for output in executor.outputs)


def test_an_aborted_request_leaves_the_swap_space() -> None:
    _, (core, _, _), answers = preempt_one(8)
    assert core.scheduler._kv.counts().num_swap_blocks > 0
    core.abort("b")
    assert core.scheduler._kv.counts().num_swap_blocks == 0
    while core.has_work:
        collect(core.step(), answers)
    assert core.scheduler.is_idle


def test_blocks_come_back_into_other_blocks_with_their_scales() -> None:
    torch.manual_seed(0)
    shape = (6, 2, 4, 8)
    values = [torch.randint(-128, 127, shape, dtype=torch.int8) for _ in range(2)]
    cache = KVCache(*values, *(torch.rand(shape[:3]) for _ in range(2)))
    before = [tensor.clone() for tensor in cache if tensor is not None]
    memory = BlockCopier([cache], num_blocks=3)
    memory.begin(SchedulerOutput(0, {}, swapped_out={2: 5, 0: 1}, swapped_in={}))
    for tensor in cache:
        assert tensor is not None
        tensor[[1, 5]] = 0
    memory.begin(SchedulerOutput(0, {}, swapped_out={}, swapped_in={3: 2, 4: 0}))
    for tensor, old in zip(cache, before, strict=True):
        assert tensor is not None
        assert torch.equal(tensor[[3, 4]], old[[5, 1]])
        assert torch.equal(tensor[[0, 2]], old[[0, 2]])


def test_a_step_swaps_out_before_it_swaps_in() -> None:
    key = torch.arange(3.0).view(3, 1, 1, 1)
    memory = BlockCopier([KVCache(key, key.clone())], num_blocks=2)
    memory.begin(SchedulerOutput(0, {}, swapped_out={0: 0}, swapped_in={}))
    memory.begin(SchedulerOutput(0, {}, swapped_out={1: 2}, swapped_in={2: 0}))
    memory.begin(SchedulerOutput(0, {}, swapped_out={}, swapped_in={1: 1}))
    assert key.flatten().tolist() == [0, 2, 0]


@pytest.mark.parametrize("is_one_memory", [True, False])
def test_blocks_are_copied_in_any_way(is_one_memory: bool) -> None:
    source, target = torch.rand(5, 2, 3), torch.zeros(4, 2, 3)
    copy_blocks(source, target, {3: 1, 0: 4}, is_one_memory)
    copy_blocks(source, target, {}, is_one_memory)
    assert torch.equal(target[[3, 0]], source[[1, 4]])
    assert not target[[1, 2]].any()
