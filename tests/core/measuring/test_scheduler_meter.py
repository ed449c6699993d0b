"""What the meter counts for each request: slot-seconds, recomputed tokens, and waits."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.core.measuring.accounting import num_written_slots
from chairlift.events import RequestFinished, Step
from support.fakes import make_engine, make_request, run_to_end


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_sibling_waits_in_every_step_that_computes_its_leaders_prompt(batching: str) -> None:
    core, _, _, events = make_engine(batching=batching, max_num_seqs=1, max_num_batched_tokens=4)
    core.add(make_request("leader", list(range(9)), 2))
    core.add(make_request("behind", [7], 1))
    core.add(make_request("sibling", list(range(9)), 2, leader_id="leader"))
    run_to_end(core)
    waited = {e.request_id: e.steps_waited for e in events.events if isinstance(e, RequestFinished)}
    assert waited == {"leader": {}, "behind": {"seats": 4}, "sibling": {"sibling_prefill": 3, "seats": 2}}


@pytest.mark.parametrize(("windows", "num_blocks"), [((None,), 9), ((None, 3), 15), ((4,), 7)])
def test_slot_seconds_equal_a_sum_over_time(windows: tuple[int | None, ...], num_blocks: int) -> None:
    core, manager, _, events = make_engine(
        num_blocks=num_blocks, block_size=2, max_num_batched_tokens=9, max_num_seqs=3, windows=windows
    )
    clock: Any = core._clock
    for index in range(5):
        core.add(make_request(str(index), list(range(index + 2)), 6))
    held: dict[str, float] = {}
    used: dict[str, float] = {}
    for number in range(200):
        if not core.has_work:
            break
        output = core.scheduler.schedule(clock.now())
        assert output is not None
        seconds = 0.5 + number % 3
        for name, request in core.scheduler.unfinished.items():
            held[name] = held.get(name, 0.0) + manager.num_held_slots(request) * seconds
            used[name] = used.get(name, 0.0) + num_written_slots(request, manager) * seconds
        clock.advance(seconds)
        core.scheduler.update(core._executor.result(core._executor.submit(output)), clock.now())
    finished = [event for event in events.events if isinstance(event, RequestFinished)]
    assert len(finished) == 5
    assert sum(event.num_preemptions for event in finished) > 0
    for event in finished:
        assert event.kv_slot_seconds_held == pytest.approx(held[event.request_id])
        assert event.kv_slot_seconds_used == pytest.approx(used[event.request_id])


def test_recomputed_tokens_are_those_that_had_been_computed_before() -> None:
    core, _, executor, events = make_engine(num_blocks=8, block_size=2, enable_prefix_caching=False)
    for name in ("a", "b"):
        core.add(make_request(name, [1, 2, 3], 8))
    run_to_end(core)
    finished = {e.request_id: e for e in events.events if isinstance(e, RequestFinished)}
    computed = sum(sum(out.num_scheduled_tokens.values()) for out in executor.outputs)
    assert finished["b"].num_preemptions == 1
    assert finished["b"].num_recomputed_tokens == computed - 2 * (3 + 8 - 1) > 0
    assert (
        sum(step.num_recomputed for step in events.events if isinstance(step, Step))
        == finished["b"].num_recomputed_tokens
    )
