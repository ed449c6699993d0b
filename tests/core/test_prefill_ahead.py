"""Prompts computed ahead of a seat: who has a seat, who stands, and what becomes of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core import batching
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestFinished, RequestWaiting, Step
from chairlift.outputs import SchedulerOutput
from fakes import CheckingExecutor, collect, expected_tokens, make_engine, make_request, run_to_end


def crowd(num_requests: int, prompt: int = 3, max_tokens: int = 6, **options: Any) -> tuple[Any, ...]:
    """An engine and that many requests, r0 first, with prompts that share nothing."""
    parts = make_engine(enable_prefix_caching=False, **options)
    for index in range(num_requests):
        parts[0].add(make_request(f"r{index}", [index] * prompt, max_tokens))
    return parts


def scheduled(executor: CheckingExecutor) -> list[dict[str, int]]:
    return [output.num_scheduled_tokens for output in executor.outputs]


def steps_stood(events: EventList) -> dict[str, int]:
    return {e.request_id: e.steps_stood for e in events.events if isinstance(e, RequestFinished)}


def answers_of(num_requests: int, prompt: int = 3, max_tokens: int = 6) -> dict[str, list[int]]:
    return {f"r{i}": expected_tokens([i] * prompt, max_tokens) for i in range(num_requests)}


def test_the_first_token_comes_before_the_seat() -> None:
    core, _, executor, events = crowd(3, max_num_seqs=1, prefill_ahead=1, max_tokens=3)
    assert run_to_end(core) == answers_of(3, max_tokens=3)
    prompts, decode = {"r0": 3, "r1": 3}, 1
    assert scheduled(executor) == [
        prompts,
        {"r0": decode},
        {"r0": decode},
        {"r1": decode, "r2": 3},
        {"r1": decode},
        {"r2": decode},
        {"r2": decode},
    ]
    assert steps_stood(events) == {"r0": 0, "r1": 2, "r2": 1}
    steps = [event for event in events.events if isinstance(event, Step)]
    assert [step.standing for step in steps] == [[], ["r1"], ["r1"], [], ["r2"], [], []]


def test_seats_come_first_in_the_budget_and_nothing_is_kept_for_who_stands() -> None:
    """Chunks of those ahead are as long as the decodes leave room for, one prompt after the other."""
    core, _, executor, _ = crowd(3, prompt=10, max_num_seqs=1, prefill_ahead=2, max_num_batched_tokens=8)
    run_to_end(core)
    assert scheduled(executor)[:5] == [
        {"r0": 8},
        {"r0": 2, "r1": 6},
        {"r0": 1, "r1": 4, "r2": 3},
        {"r0": 1, "r2": 7},
        {"r0": 1},
    ]


def test_a_budget_of_the_seats_alone_is_enough() -> None:
    core, _, _, _ = crowd(6, max_num_seqs=2, prefill_ahead=4, max_num_batched_tokens=2)
    assert run_to_end(core) == answers_of(6)


def test_nobody_is_let_in_ahead_without_tokens_and_the_reason_is_seats() -> None:
    core, _, _, events = crowd(3, max_num_seqs=2, prefill_ahead=2, prompt=1, max_num_batched_tokens=2)
    core.step()
    assert core.scheduler.num_running == 2
    (waiting,) = (event for event in events.events if isinstance(event, RequestWaiting))
    assert (waiting.request_id, waiting.reason, waiting.num_running) == ("r2", "seats", 2)


def test_more_urgent_requests_take_the_seat_of_the_last_one() -> None:
    core, _, executor, events = crowd(1, max_num_seqs=1, prefill_ahead=1, scheduling_policy="priority")
    core.step()
    core.add(make_request("urgent", [7] * 3, 3, priority=-1))
    answers = run_to_end(core)
    assert scheduled(executor)[1:5] == [{"r0": 1, "urgent": 3}, {"urgent": 1}, {"urgent": 1}, {"r0": 1}]
    assert steps_stood(events) == {"urgent": 0, "r0": 2}
    assert answers["r0"] == expected_tokens([0] * 3, 6)[1:]
    assert answers["urgent"] == expected_tokens([7] * 3, 3)


def test_without_a_place_ahead_an_urgent_request_waits_as_ever() -> None:
    core, _, executor, _ = crowd(2, max_num_seqs=1, prefill_ahead=1, scheduling_policy="priority")
    core.step()
    core.add(make_request("urgent", [7] * 3, 3, priority=-1))
    core.step()
    assert scheduled(executor)[1] == {"r0": 1}
    run_to_end(core)


def test_whoever_stands_is_preempted_first_and_takes_memory_again_with_its_seat() -> None:
    """82 slots for each in the end, and 96 for all; r0 grows into what r1 holds, and later r1 into what r2 does."""
    core, manager, _, events = crowd(3, max_tokens=80, max_num_seqs=1, prefill_ahead=2, num_blocks=6, block_size=16)
    assert run_to_end(core) == answers_of(3, max_tokens=80)
    steps = [event for event in events.events if isinstance(event, Step)]
    assert [step.preempted for step in steps if step.preempted] == [["r1"], ["r2"]]
    preempted = next(step.step for step in steps if step.preempted)
    again = next(step for step in steps[preempted:] if "r1" in step.admitted)
    assert "r0" not in again.request_ids
    assert again.num_recomputed == 3
    reasons = [(e.request_id, e.reason) for e in events.events if isinstance(e, RequestWaiting)]
    assert ("r1", "seats") in reasons
    assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize(("num_blocks", "num_running"), [(5, 1), (6, 2), (8, 3)])
def test_the_seats_are_spared_what_they_will_soon_write(num_blocks: int, num_running: int) -> None:
    """r0 has 3 slots of its first block and writes at most 8; each prompt takes 2 blocks of 2."""
    core, _, _, events = crowd(3, max_num_seqs=1, prefill_ahead=2, num_blocks=num_blocks, block_size=2)
    core.step()
    assert core.scheduler.num_running == num_running
    run_to_end(core)
    assert not any(step.preempted for step in events.events if isinstance(step, Step))


@pytest.mark.parametrize("kv", ["exact", "oracle", "pow2"])
def test_with_a_reservation_the_seats_need_to_be_spared_nothing(kv: str) -> None:
    """Not even up to `max_tokens`, where less is reserved."""
    core, manager, _, _ = make_engine(kv=kv, num_blocks=32, block_size=2, max_num_seqs=1, prefill_ahead=3)
    for index in range(4):
        core.add(make_request(f"r{index}", [index] * 3, 8 if kv == "exact" else 40, output_len=8))
    core.step()
    assert (core.scheduler.num_running, manager.num_free_blocks) == (4, 0)


@pytest.mark.parametrize("steps_ahead", [0, 1, 2])
def test_an_abort_gives_the_place_to_the_next(steps_ahead: int) -> None:
    core, manager, executor, events = crowd(4, max_num_seqs=1, prefill_ahead=1, steps_ahead=steps_ahead)
    answers: dict[str, list[int]] = {}
    collect(core.step(), answers)
    assert core.abort("r1")
    answers |= {name: answers.get(name, []) + tokens for name, tokens in run_to_end(core).items()}
    expected = answers_of(4)
    assert {name: answers[name] for name in ("r0", "r2", "r3")} == {n: expected[n] for n in ("r0", "r2", "r3")}
    first_r2 = next(i for i, step in enumerate(scheduled(executor)) if "r2" in step)
    assert "r0" in scheduled(executor)[first_r2]
    assert steps_stood(events)["r2"] > 0
    assert manager.num_free_blocks == manager.num_blocks


def test_a_first_token_that_is_the_last_one_needs_no_seat() -> None:
    core, _, _, events = crowd(1, max_num_seqs=1, prefill_ahead=2)
    for index in range(4):
        core.add(make_request(f"short{index}", [index, 9], 1))
    for _ in range(3):
        core.step()
    assert core.scheduler.unfinished_ids() == ["r0"]
    assert steps_stood(events) == dict.fromkeys((f"short{index}" for index in range(4)), 0)


def test_siblings_go_ahead_when_their_leader_has_computed_the_prompt_they_share() -> None:
    core, _, executor, _ = make_engine(max_num_seqs=1, prefill_ahead=3)
    core.add(make_request("first", [9], 8))
    core.add(make_request("leader", [1, 2, 3, 4, 5], 3))
    core.add(make_request("sibling", [1, 2, 3, 4, 5], 3, leader_id="leader"))
    answers = run_to_end(core)
    assert scheduled(executor)[:3] == [{"first": 1, "leader": 5}, {"first": 1, "sibling": 1}, {"first": 1}]
    assert answers["sibling"] == answers["leader"] == expected_tokens([1, 2, 3, 4, 5], 3)


@pytest.mark.parametrize("kv", ["exact", "max"])
def test_reservations_are_made_ahead_of_the_seat(kv: str) -> None:
    core, manager, _, _ = make_engine(kv=kv, num_blocks=16, max_model_len=16, max_num_seqs=1, prefill_ahead=2)
    for index in range(4):
        core.add(make_request(f"r{index}", [index] * 3, 6))
    core.step()
    held = manager.num_blocks - manager.num_free_blocks
    assert (core.scheduler.num_running, held) == (3, 3 * (2 if kv == "exact" else 4))
    assert run_to_end(core).keys() == {f"r{index}" for index in range(4)}


def test_under_fair_turns_the_seat_goes_to_who_had_less() -> None:
    """One seat, two tenants: both decode all the time, neither gets far ahead of the other."""
    core, _, _, events = make_engine(max_num_seqs=1, prefill_ahead=1, scheduling_policy="fair")
    core.add(make_request("a", [1, 2, 3], 8, tenant="a"))
    core.add(make_request("b", [4, 5, 6], 8, tenant="b"))
    counts = {"a": 0, "b": 0}
    while core.has_work:
        for output in core.step():
            counts[output.request_id] += len(output.new_token_ids)
        assert abs(counts["a"] - counts["b"]) <= 2
    assert set(steps_stood(events).values()) <= {6, 7, 8}


def test_nothing_changes_where_nobody_has_to_wait() -> None:
    def outputs(prefill_ahead: int) -> list[SchedulerOutput]:
        core, _, executor, _ = crowd(4, max_num_seqs=4, prefill_ahead=prefill_ahead, max_num_batched_tokens=6)
        run_to_end(core)
        return list(executor.outputs)

    assert outputs(0) == outputs(3)


def test_it_is_refused_where_it_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"prefill_ahead=2 is for batching=continuous.*Leave it out, or choose"):
        SchedulerConfig(64, batching="static", prefill_ahead=2)
    with pytest.raises(ConfigError, match="prefill_ahead must be at least 0, got -1"):
        EngineConfig(prefill_ahead=-1)
    with pytest.raises(ConfigError, match="prefill_ahead must be an integer, got True"):
        EngineConfig(prefill_ahead=True)


def test_seats_that_empty_at_once_are_taken_at_once() -> None:
    core, _, executor, _ = crowd(6, max_num_seqs=2, prefill_ahead=4, max_tokens=3)
    run_to_end(core)
    rows = [len(step) for step in scheduled(executor)]
    assert rows == [6, 2, 2, 2, 2, 2, 2]


@given(
    arrivals=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 12), st.integers(0, 2)),
        min_size=3,
        max_size=10,
    ),
    seats=st.integers(1, 3),
    spared_tokens=st.sampled_from([0, 4, batching.SPARED_TOKENS]),
    options=st.fixed_dictionaries(
        {
            "prefill_ahead": st.integers(1, 5),
            "num_blocks": st.integers(23, 40),
            "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]),
            "enable_prefix_caching": st.booleans(),
            "steps_ahead": st.integers(0, 2),
        }
    ),
    extra_budget=st.integers(0, 12),
    gap=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_in_short_memory_everybody_ends_with_the_same_tokens(
    arrivals: list[tuple[list[int], int, int]],
    seats: int,
    spared_tokens: int,
    options: dict[str, Any],
    extra_budget: int,
    gap: int,
) -> None:
    """The executor checks that nobody without a seat goes beyond its prompt; the pool holds the longest request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "SPARED_TOKENS", spared_tokens)
        core, manager, _, _ = make_engine(
            block_size=1, max_num_seqs=seats, max_num_batched_tokens=seats + extra_budget, **options
        )
        answers: dict[str, list[int]] = {}
        for index, (prompt, max_tokens, priority) in enumerate(arrivals):
            core.add(make_request(str(index), prompt, max_tokens, priority=priority, tenant="ab"[index % 2]))
            for _ in range(gap):
                collect(core.step(), answers)
        for name, tokens in run_to_end(core).items():
            answers.setdefault(name, []).extend(tokens)
    assert answers == {str(i): expected_tokens(prompt, count) for i, (prompt, count, _) in enumerate(arrivals)}
    assert manager.num_free_blocks == manager.num_blocks
