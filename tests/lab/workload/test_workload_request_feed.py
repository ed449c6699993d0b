"""RequestFeed releases every request once, at the time at which it is due."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, dependency_order, full_prompt_lens
from chairlift.lab.workload.request_feed import RequestFeed


def request(request_id: str, arrival: float = 0.0, **changes: Any) -> WorkloadRequest:
    return WorkloadRequest(request_id, arrival, **{"prompt_token_ids": [1], "output_len": 2, **changes})


def ids(requests: list[WorkloadRequest]) -> list[str]:
    return [r.request_id for r in requests]


def test_open_loop_in_arrival_order_with_the_intended_times() -> None:
    feed = RequestFeed([request("b", 2.0), request("a", 0.5), request("c", 2.0)])
    assert feed.next_time() == 0.5
    assert feed.pop_due(0.4) == []
    assert ids(feed.pop_due(0.5)) == ["a"]
    assert feed.next_time() == 2.0
    late = feed.pop_due(7.0)
    assert [(r.request_id, r.arrival) for r in late] == [("b", 2.0), ("c", 2.0)]
    assert feed.is_exhausted
    assert feed.next_time() is None
    assert feed.pop_due(math.inf) == []
    assert feed.num_unfinished == 3


def test_closed_loop_arrives_when_a_seat_becomes_free() -> None:
    feed = RequestFeed([request(name) for name in "abcd"], max_concurrency=2)
    assert ids(feed.pop_due(0.0)) == ["a", "b"]
    assert feed.next_time() is None
    assert feed.pop_due(5.0) == []
    feed.finish("b", [], 3.0)
    feed.finish("a", [], 4.0)
    assert feed.next_time() == 3.0
    assert [(r.request_id, r.arrival) for r in feed.pop_due(6.0)] == [("c", 3.0), ("d", 4.0)]
    assert feed.is_exhausted


def test_free_seat_does_not_make_a_request_earlier() -> None:
    feed = RequestFeed([request("a"), request("b", 9.0)], max_concurrency=1)
    feed.pop_due(0.0)
    feed.finish("a", [], 1.0)
    assert feed.next_time() == 9.0
    assert feed.pop_due(8.9) == []
    assert feed.pop_due(9.5)[0].arrival == 9.0


def test_conversation_carries_its_history() -> None:
    feed = RequestFeed(
        [
            request("t1", 1.0, prompt_token_ids=b"\x05\x06", max_tokens=8, priority=3),
            request("t2", 0.5, prompt_token_ids=[7], after="t1", carries_history=True),
            request("t3", 0.0, prompt_token_ids=[], after="t2", carries_history=True),
            request("other", 2.0, prompt_token_ids=[9], after="t1"),
        ]
    )
    (first,) = feed.pop_due(1.0)
    assert first == request("t1", 1.0, prompt_token_ids=[5, 6], max_tokens=8, priority=3)
    assert feed.next_time() is None
    assert not feed.is_exhausted
    feed.finish("t1", [50, 51], 4.0)
    (second,) = feed.pop_due(5.0)
    assert second == request("t2", 4.5, prompt_token_ids=[5, 6, 50, 51, 7])
    feed.finish("t2", [60], 6.0)
    assert feed.pop_due(6.0) == [
        request("t3", 6.0, prompt_token_ids=[5, 6, 50, 51, 7, 60]),
        request("other", 6.0, prompt_token_ids=[9]),
    ]
    assert feed.is_exhausted


def test_full_prompt_lens_include_histories() -> None:
    conversation = [
        request("t3", after="t2", carries_history=True, prompt_token_ids=[1, 2, 3]),
        request("t1", prompt_token_ids=[1] * 10),
        request("t2", after="t1", carries_history=True, output_len=5),
        request("x", after="t1"),
    ]
    assert full_prompt_lens(conversation) == {"t1": 10, "t2": 13, "x": 1, "t3": 21}
    assert ids(dependency_order(conversation)) == ["t1", "t2", "t3", "x"]


@st.composite
def workloads(draw: st.DrawFn) -> list[WorkloadRequest]:
    """Requests in any order, some after an earlier one."""
    count = draw(st.integers(1, 12))
    made: list[WorkloadRequest] = []
    for i in range(count):
        after = f"r{draw(st.integers(0, i - 1))}" if i and draw(st.booleans()) else None
        carries = after is not None and draw(st.booleans())
        arrival = float(draw(st.integers(0, 6)))
        made.append(request(f"r{i}", arrival, prompt_token_ids=[i], after=after, carries_history=carries))
    return draw(st.permutations(made))


@given(workloads(), st.none() | st.integers(1, 3), st.lists(st.integers(0, 5), min_size=12, max_size=12))
def test_each_request_is_released_once_and_exactly_when_due(
    workload: list[WorkloadRequest], limit: int | None, durations: list[int]
) -> None:
    feed = RequestFeed(workload, limit)
    by_id = {r.request_id: r for r in workload}
    running: dict[str, float] = {}
    ended: dict[str, float] = {}
    prompts: dict[str, list[int]] = {}
    now = 0.0
    while not feed.is_exhausted or running:
        times = [*running.values(), *([] if (due := feed.next_time()) is None else [due])]
        assert times, "unfinished, and nothing will ever happen"
        now = min(times)
        for name in [name for name, end in running.items() if end == now]:
            del running[name]
            ended[name] = now
            feed.finish(name, [100, 101], now)
        for item in feed.pop_due(now):
            original = by_id[item.request_id]
            assert item.request_id not in prompts
            assert item.arrival == now
            ready = original.arrival + (0.0 if original.after is None else ended[original.after])
            assert item.arrival >= ready
            if limit is None or len(running) + len(ended) == 0:
                assert item.arrival == ready
            expected = [*prompts[original.after], 100, 101] if original.carries_history and original.after else []
            assert list(item.prompt_token_ids) == [*expected, *original.prompt_token_ids]
            prompts[item.request_id] = list(item.prompt_token_ids)
            running[item.request_id] = now + durations[len(prompts) - 1]
        assert limit is None or len(running) <= limit
        assert feed.num_unfinished == len(running)
    assert prompts.keys() == by_id.keys()
    assert {name: len(prompt) for name, prompt in prompts.items()} == full_prompt_lens(workload)


@given(workloads(), st.integers(1, 3))
def test_no_seat_is_free_while_a_request_is_ready(workload: list[WorkloadRequest], limit: int) -> None:
    feed = RequestFeed(workload, limit)
    now = 0.0
    while not feed.is_exhausted:
        now = max(now, feed.next_time() or 0.0)
        out = [item.request_id for item in feed.pop_due(now)]
        assert feed.num_unfinished == limit or (feed.next_time() or math.inf) > now
        now += 1.0
        for name in out:
            feed.finish(name, [], now)


@pytest.mark.parametrize(
    ("workload", "problem"),
    [
        ([request("a"), request("b"), request("a")], "request id 'a' occurs more than once"),
        ([request("a", after="z")], "request 'a': `after` names no request: 'z'"),
        ([request("a"), request("b", after="c"), request("c", after="b")], "'[bc]' can never arrive: .* cycle"),
        ([request("a", after="a")], "'a' can never arrive"),
    ],
)
def test_inconsistent_workloads_are_rejected(workload: list[WorkloadRequest], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RequestFeed(workload)


def test_max_concurrency_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"max_concurrency must be at least 1, .* got 0"):
        RequestFeed([request("a")], 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arrival": -1.0}, "arrival must be .* got -1.0"),
        ({"arrival": math.nan}, "arrival must be .* got nan"),
        ({"output_len": 0}, "output_len must be at least 1, got 0"),
        ({"max_tokens": 1}, "max_tokens must be at least output_len=2, got 1"),
        ({"carries_history": True}, "carries_history needs `after`"),
        ({"prompt_token_ids": []}, "prompt_token_ids must hold at least one token"),
    ],
)
def test_invalid_requests_are_rejected(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"workload request 'a': {problem}"):
        request("a", **changes)


def test_max_output_len_is_the_declared_limit() -> None:
    assert request("a").max_output_len == 2
    assert request("a", max_tokens=9).max_output_len == 9
