"""Pacing: which streams give their seats, when they return, and what readers gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import SchedulerConfig
from chairlift.core.queues.paced_queue import PAUSE_SECONDS, RESUME_SECONDS, PacedQueue
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.errors import ConfigError
from chairlift.events import Step
from chairlift.request import Request
from support.fakes import expected_tokens, make_engine, make_request

SPEED = 2.0


def stream(queue: PacedQueue, arrival: int, num_tokens: int) -> Request:
    """A request whose reader began to read now, with this number of generated tokens."""
    request = make_request(f"r{arrival}", [1], max_tokens=100)
    request.arrival_index = arrival
    request.num_tokens += num_tokens
    if num_tokens:
        queue.record_sampling([request])
    return request


def make_queue() -> PacedQueue:
    queue = PacedQueue(RequestQueue(), SPEED)
    queue.begin_step(0.0)
    return queue


def test_a_stream_that_is_far_ahead_gives_its_seat_and_is_the_first_to_be_preempted() -> None:
    queue = make_queue()
    head, behind, ahead = (stream(queue, index, int(SPEED * seconds)) for index, seconds in enumerate((0, 3, 4)))
    assert sorted([ahead, behind], key=queue.key) == [behind, ahead]
    assert queue.displaces(head, ahead)
    assert not queue.displaces(head, behind)
    assert not queue.displaces(ahead, ahead), "the head has enough to read itself"
    queue.begin_step(0.5)
    assert not queue.displaces(head, ahead), "its reader has read for a while"


@pytest.mark.parametrize("fields", [{"is_streamed": False}, {"n": 2, "use_beam_search": True}])
def test_a_request_without_a_reader_is_not_paced(fields: dict[str, bool]) -> None:
    queue = make_queue()
    request, head = stream(queue, 0, 0), stream(queue, 1, 0)
    request.sampling_params = replace(request.sampling_params, **fields)
    request.num_tokens += 100
    queue.record_sampling([request])
    assert queue.key(request) < queue.key(head)
    assert not queue.displaces(head, request)
    queue.push(request)
    assert queue.peek() is request


def test_a_paused_stream_returns_before_its_reader_waits() -> None:
    queue = make_queue()
    paused, other = stream(queue, 0, int(SPEED * PAUSE_SECONDS)), stream(queue, 1, 0)
    for request in (paused, other):
        queue.push(request)
    assert (len(queue), queue.peek()) == (2, other)
    queue.begin_step(PAUSE_SECONDS - RESUME_SECONDS)
    assert queue.pop() is paused
    assert queue.pop() is other


def test_a_paused_stream_runs_if_no_other_request_waits() -> None:
    queue = make_queue()
    first, last = stream(queue, 0, 20), stream(queue, 1, 40)
    for request in (last, first):
        queue.push(request)
    assert [queue.pop(), queue.peek()] == [first, last]
    queue.discard(last)
    assert queue.peek() is None


@given(
    tokens=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    gone=st.sets(st.integers(0, 11)),
    gap=st.sampled_from([0.1, 1.0, 5.0]),
)
@settings(deadline=None)
def test_no_pause_is_longer_than_the_text_that_its_reader_has(tokens: list[int], gone: set[int], gap: float) -> None:
    queue = make_queue()
    streams = [stream(queue, index, count) for index, count in enumerate(tokens)]
    for request in streams:
        queue.push(request)
    for index in gone & set(range(len(streams))):
        queue.discard(streams[index])
        queue.forget(streams[index])
    waiting = {request for index, request in enumerate(streams) if index not in gone}
    now = 0.0
    while waiting:
        due = [r for r in waiting if r.num_tokens - 1 <= SPEED * (now + RESUME_SECONDS)]
        head = queue.pop()
        assert head in (due or waiting)
        waiting.remove(head)
        assert len(queue) == len(waiting)
        now += gap
        queue.begin_step(now)


def serve(speed: float | None) -> tuple[dict[str, list[int]], list[Step]]:
    """The tokens and the steps of three requests over two seats, at ten steps a second."""
    core, _, _, events = make_engine(max_num_seqs=2, max_model_len=256, pacing_tokens_per_second=speed)
    answers: dict[str, list[int]] = {}
    for name in "abc":
        core.add(make_request(name, [ord(name)], max_tokens=60))
    while core.has_work:
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        core._clock.advance(0.1)  # type: ignore[attr-defined]
    return answers, [event for event in events.events if isinstance(event, Step)]


def test_paced_streams_have_the_same_tokens_and_a_request_that_waits_starts_earlier() -> None:
    (paced, paced_steps), (others, steps) = serve(2.0), serve(None)
    assert paced == others == {name: expected_tokens([ord(name)], 60) for name in "abc"}
    assert next(step.step for step in steps if "c" in step.admitted) == 60
    assert next(step.step for step in paced_steps if "c" in step.admitted) < 15
    assert sum(len(step.displaced) for step in paced_steps) > 1
    assert len(paced_steps) < len(steps) + 5, "pauses cost little"


def test_a_call_without_a_reader_gives_its_seat_back_to_a_paused_stream() -> None:
    core, _, _, _ = make_engine(num_blocks=128, max_num_seqs=2, pacing_tokens_per_second=SPEED)
    times: dict[str, list[float]] = {}
    for step in range(400):
        for name in {0: "ab", 12: "cd"}.get(step, ""):
            max_tokens = 60 if name in "ab" else 150
            core.add(make_request(name, [ord(name)], max_tokens=max_tokens, is_streamed=name in "ab"))
        for output in core.step():
            times.setdefault(output.request_id, []).extend([core.now()] * len(output.new_token_ids))
        core._clock.advance(0.1)  # type: ignore[attr-defined]
    assert not core.has_work
    for name in "ab":
        first = times[name][0]
        assert all(time <= first + index / SPEED for index, time in enumerate(times[name])), "no reader waits"
    assert max(times["c"][0], times["d"][0]) < min(times["a"][-1], times["b"][-1]), "the streams were paused"


def test_pacing_needs_continuous_batching() -> None:
    with pytest.raises(ConfigError, match="pacing_tokens_per_second=5 cannot be combined with batching=static"):
        SchedulerConfig(64, batching="static", pacing_tokens_per_second=5.0)
