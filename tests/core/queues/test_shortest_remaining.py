"""Shortest remaining processing time: the order and the limited preemption."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.queues.shortest_remaining import MAX_DISPLACED_SHARE, ShortestRemainingQueue
from chairlift.events import RequestFinished, Step
from chairlift.request import Request
from support.fakes import make_engine, make_request, run_to_end


def predicted(name: str, prompt_len: int, length: int, arrival: int = 0) -> Request:
    request = make_request(name, list(range(prompt_len)), max_tokens=100)
    request.predicted_len, request.arrival_index = length, arrival
    return request


def generated(request: Request, count: int) -> Request:
    """Let a running request have generated tokens."""
    request.num_computed_tokens = request.num_prompt_tokens + count - 1
    request.num_tokens = request.num_prompt_tokens + count
    return request


def test_the_least_work_goes_first_and_then_the_earlier_arrival() -> None:
    queue = ShortestRemainingQueue()
    for arrival, (name, prompt, length) in enumerate([("long", 4, 50), ("prompt", 40, 5), ("a", 4, 5), ("b", 4, 5)]):
        queue.push(predicted(name, prompt, length, arrival))
    assert [queue.pop().request_id for _ in range(4)] == ["a", "b", "prompt", "long"]


def test_work_that_is_done_does_not_count() -> None:
    queue = ShortestRemainingQueue()
    queue.push(generated(predicted("started", 40, 20), 12))
    queue.push(predicted("new", 4, 10, 1))
    assert [queue.pop().request_id for _ in range(2)] == ["started", "new"]


def test_a_request_with_less_work_displaces_until_80_percent_are_generated() -> None:
    queue, head = ShortestRemainingQueue(), predicted("head", 4, 1, 1)
    assert queue.displaces(head, generated(predicted("running", 4, 100), 79))
    assert not queue.displaces(head, generated(predicted("running", 4, 100), 80))
    assert not queue.displaces(predicted("same", 4, 100, 1), predicted("running", 4, 100))


def test_a_request_whose_pending_token_was_dropped_can_be_removed() -> None:
    queue = ShortestRemainingQueue()
    requests = [generated(predicted(f"r{index}", 4, 20, index), 5 + index) for index in range(3)]
    for request in requests:
        queue.push(request)
    requests[1].drop_pending()
    queue.discard(requests[1])
    assert [queue.pop().request_id for _ in range(2)] == ["r2", "r0"]


def test_a_displaced_request_continues_with_its_tokens() -> None:
    core, _, _, events = make_engine(max_num_seqs=1, scheduling_policy="srpt", length_predictor="max_tokens")
    core.add(make_request("long", [1, 2, 3, 4, 5], max_tokens=20))
    for _ in range(6):
        core.step()
    core.add(make_request("short", [6], max_tokens=2))
    core.scheduler._observer.preempted.append("earlier")  # by an attempt that scheduled nothing
    answers = run_to_end(core)
    ended = [event for event in events.events if isinstance(event, RequestFinished)]
    assert [(event.request_id, event.num_preemptions) for event in ended] == [("short", 0), ("long", 1)]
    assert ended[1].num_output_tokens == 20
    assert len(answers["long"]) == 14  # those after the first six steps
    assert [step.displaced for step in events.events if isinstance(step, Step) and step.preempted] == [
        {"long": "short"}
    ]
    assert ended[1].num_recomputed_tokens < 4, "only a block that was not full is computed again"


def test_reservations_are_not_displaced() -> None:
    core, _, _, events = make_engine(
        max_num_seqs=1, scheduling_policy="srpt", length_predictor="max_tokens", kv="exact"
    )
    core.add(make_request("long", [1, 2, 3], max_tokens=20))
    core.step()
    core.add(make_request("short", [6], max_tokens=2))
    run_to_end(core)
    assert all(event.num_preemptions == 0 for event in events.events if isinstance(event, RequestFinished))


LOADS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 12), st.integers(1, 30)), min_size=2, max_size=25
)  # steps before the arrival, prompt tokens, output tokens


@given(load=LOADS, seats=st.integers(1, 3), steps_ahead=st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_only_unsettled_requests_are_displaced_by_those_with_less_work(
    load: list[tuple[int, int, int]], seats: int, steps_ahead: int
) -> None:
    core, _, _, events = make_engine(
        num_blocks=400,
        max_num_seqs=seats,
        scheduling_policy="srpt",
        length_predictor="oracle",
        steps_ahead=steps_ahead,
    )
    lengths = {}
    for index, (gap, prompt, output) in enumerate(load):
        for _ in range(gap):
            core.step()
        lengths[f"r{index}"] = output
        core.add(make_request(f"r{index}", [index] * prompt, output, output_len=output))
    run_to_end(core)
    sampled = dict.fromkeys(lengths, 0)
    for step in (event for event in events.events if isinstance(event, Step)):
        assert list(step.displaced) == step.preempted, "memory is never short"
        assert len(step.displaced) <= 1
        for victim, head in step.displaced.items():
            left = lengths[victim] - sampled[victim]
            assert sampled[victim] < MAX_DISPLACED_SHARE * lengths[victim]
            assert head in step.admitted
            assert lengths[head] - sampled[head] < left or sampled[victim] == 0
        for name, count in zip(step.request_ids, step.num_new, strict=True):
            sampled[name] += count
    assert sampled == lengths, "every request of a finite load is served"
