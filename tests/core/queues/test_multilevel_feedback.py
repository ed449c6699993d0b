"""The multi-level feedback queue: levels by service, demotion, displacement, and the rule against starvation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.engine_core import EngineCore
from chairlift.core.queues.multilevel_feedback import MultilevelFeedbackQueue
from chairlift.events import EventList, RequestArrived, RequestFinished, Step
from chairlift.request import Request
from support.fakes import make_engine, make_request, run_to_end

QUANTUM = 32


def waiting(name: str, prompt_len: int, num_output: int = 0, arrival: int = 0) -> Request:
    request = make_request(name, list(range(prompt_len)), max_tokens=400)
    request.num_tokens += num_output
    request.arrival_index = arrival
    return request


@pytest.mark.parametrize(
    ("prompt_len", "num_output", "level"),
    [
        (1, 0, 0),
        (32, 0, 0),
        (33, 0, 1),
        (128, 0, 2),
        (129, 0, 3),
        (2, 14, 0),  # service 30 of 32
        (2, 15, 1),  # 32
        (2, 46, 1),  # 94 of 32 + 64
        (2, 47, 2),  # 96
        (128, 1, 3),  # 130 of 128
        (100, 13, 2),  # 126 of 128
    ],
)
def test_the_level_is_that_of_the_prompt_and_then_of_the_service(prompt_len: int, num_output: int, level: int) -> None:
    assert MultilevelFeedbackQueue(QUANTUM).level(waiting("a", prompt_len, num_output)) == level


def test_levels_are_in_order_and_first_come_first_served() -> None:
    queue = MultilevelFeedbackQueue(QUANTUM)
    for arrival, (name, prompt_len) in enumerate([("long", 200), ("a", 3), ("middle", 50), ("b", 30)]):
        queue.push(waiting(name, prompt_len, arrival=arrival))
    assert [queue.pop().request_id for _ in range(4)] == ["a", "b", "middle", "long"]


def test_a_request_displaces_those_at_least_two_levels_below_it() -> None:
    queue, head = MultilevelFeedbackQueue(QUANTUM), waiting("head", 3)
    assert queue.displaces(head, waiting("running", 3, 50))
    assert not queue.displaces(head, waiting("running", 3, 20))


def test_a_promoted_request_has_a_new_quantum_and_is_forgotten_at_its_end() -> None:
    queue = MultilevelFeedbackQueue(QUANTUM, starvation_steps=3)
    late, early = waiting("late", 300, 40), waiting("early", 3, arrival=1)
    queue.push(late)
    queue.push(early)
    for _ in range(3):
        queue.record_sampling([])
    queue.push(waiting("new", 3, arrival=2))
    assert queue.pop() is early, "it entered level 0 before"
    assert queue.pop() is late
    assert queue.level(late) == 0
    late.num_tokens += QUANTUM // 2
    assert queue.level(late) == 1
    queue.forget(late)
    assert queue.level(late) > 1


def test_a_wait_that_ended_is_not_promoted() -> None:
    queue = MultilevelFeedbackQueue(QUANTUM, starvation_steps=2)
    request = waiting("a", 300)
    queue.push(request)
    queue.record_sampling([])
    queue.pop()
    queue.push(request)
    queue.record_sampling([])
    assert queue.level(request) > 0
    queue.record_sampling([])
    assert queue.level(request) == 0


def mlfq_engine(starvation_steps: int, seats: int, steps_ahead: int = 0) -> tuple[EngineCore, EventList]:
    core, _, _, events = make_engine(
        num_blocks=2000,
        max_num_seqs=seats,
        max_num_batched_tokens=64,
        max_model_len=512,
        scheduling_policy="mlfq",
        steps_ahead=steps_ahead,
    )
    queue = core.scheduler.queue
    assert isinstance(queue, MultilevelFeedbackQueue)
    queue._quantum, queue._starvation_steps = QUANTUM, starvation_steps
    return core, events


@pytest.mark.parametrize("max_model_len", [2, 3])
def test_the_quantum_of_a_short_context_is_not_zero(max_model_len: int) -> None:
    core, *_ = make_engine(scheduling_policy="mlfq", max_model_len=max_model_len)
    core.add(make_request("a", [1], max_tokens=1))
    assert len(run_to_end(core)["a"]) == 1


def is_served_in_a_flood(starvation_steps: int) -> bool:
    """Whether a long request ends while short ones take all seats."""
    core, events = mlfq_engine(starvation_steps, seats=1)
    core.add(make_request("long", [1] * 40, 30))
    for index in range(900):
        if index % 4 == 0:
            core.add(make_request(f"short{index}", [2, index], 8))
        core.step()
    ended = {event.request_id for event in events.events if isinstance(event, RequestFinished)}
    assert "short0" in ended
    return "long" in ended


def test_without_promotion_a_flood_of_short_requests_starves_a_long_one() -> None:
    assert is_served_in_a_flood(starvation_steps=100)
    assert not is_served_in_a_flood(starvation_steps=10_000)


LOADS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 40), st.integers(1, 60)), min_size=2, max_size=25)


@given(load=LOADS, seats=st.integers(1, 3), steps_ahead=st.integers(0, 1), starvation_steps=st.sampled_from([5, 40]))
@settings(max_examples=20, deadline=None)
def test_no_wait_is_longer_than_the_starvation_rule_allows(
    load: list[tuple[int, int, int]], seats: int, steps_ahead: int, starvation_steps: int
) -> None:
    core, events = mlfq_engine(starvation_steps, seats, steps_ahead)
    for index, (gap, prompt, output) in enumerate(load):
        for _ in range(gap):
            core.step()
        core.add(make_request(f"r{index}", [index] * prompt, output))
    run_to_end(core)
    since: dict[str, int] = {}
    # Each other request keeps a seat before it for at most the quanta of levels 0 and 1 and the steps of a prompt.
    longest = starvation_steps + len(load) * (3 * QUANTUM // 2 + 3)
    for event in events.events:
        if isinstance(event, RequestArrived):
            since[event.request_id] = event.step
        elif isinstance(event, Step):
            for name in event.preempted:
                since[name] = event.step
            for name in event.admitted:
                assert event.step - since.pop(name) <= longest
            if event.wait_reason == "seats":
                assert event.num_running == seats, "no seat is empty while a request waits"
    assert not since


def test_accepted_drafts_are_not_counted_as_steps() -> None:
    queue = MultilevelFeedbackQueue(QUANTUM, starvation_steps=2)
    request = waiting("a", 300)
    queue.push(request)
    queue.record_sampling([])
    for _ in range(5):
        queue.record_accepted_drafts(waiting("running", 3), 2)
    assert queue.level(request) > 0
    queue.record_sampling([])
    assert queue.level(request) == 0


def test_a_search_with_several_beams_takes_no_seat_of_others() -> None:
    queue, running = MultilevelFeedbackQueue(QUANTUM), [waiting("running", 3, 50)]
    _, manager, _, _ = make_engine()
    head = waiting("head", 3)
    queue.push(head)
    assert queue.displacing_head(running, manager, 1) is head
    head.num_seats = 2
    assert queue.displacing_head(running, manager, 1) is None


def test_a_finished_request_is_not_kept() -> None:
    queue = MultilevelFeedbackQueue(QUANTUM)
    request = waiting("a", 3)
    queue.push(request)
    assert queue.pop() is request
    queue.forget(request)
    assert not queue._entries


def test_starved_requests_are_promoted_in_the_order_of_their_waits() -> None:
    queue = MultilevelFeedbackQueue(QUANTUM, starvation_steps=2)
    queue.push(waiting("first", 300, arrival=0))
    queue.push(waiting("second", 100, arrival=1))
    queue.record_sampling([])
    queue.push(waiting("late", 200, arrival=2))
    queue.record_sampling([])
    assert [queue.pop().request_id for _ in range(3)] == ["first", "second", "late"]
