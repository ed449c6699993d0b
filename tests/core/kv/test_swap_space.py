from __future__ import annotations

from typing import Any

from chairlift.core.kv.block_copies import SwapSpace
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request
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
