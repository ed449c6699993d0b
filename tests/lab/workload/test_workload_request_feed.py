"""RequestFeed releases every request once, at the time at which it is due."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest
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


def test_closed_loop_arrives_when_a_seat_becomes_free() -> None:
    feed = RequestFeed([request(name) for name in "abcd"], max_concurrency=2)
    assert ids(feed.pop_due(0.0)) == ["a", "b"]
    assert feed.next_time() is None
    assert feed.pop_due(5.0) == []
    feed.finish("b", 3.0)
    feed.finish("a", 4.0)
    assert feed.next_time() == 3.0
    assert [(r.request_id, r.arrival) for r in feed.pop_due(6.0)] == [("c", 3.0), ("d", 4.0)]
    assert feed.is_exhausted


def test_free_seat_does_not_make_a_request_earlier() -> None:
    feed = RequestFeed([request("a"), request("b", 9.0)], max_concurrency=1)
    feed.pop_due(0.0)
    feed.finish("a", 1.0)
    assert feed.next_time() == 9.0
    assert feed.pop_due(8.9) == []
    assert feed.pop_due(9.5)[0].arrival == 9.0


@st.composite
def workloads(draw: st.DrawFn) -> list[WorkloadRequest]:
    """Requests in any order."""
    arrivals = draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    return [request(f"r{index}", float(arrival)) for index, arrival in enumerate(arrivals)]


@given(workloads(), st.none() | st.integers(1, 3), st.lists(st.integers(0, 5), min_size=12, max_size=12))
def test_each_request_is_released_once_and_exactly_when_due(
    workload: list[WorkloadRequest], limit: int | None, durations: list[int]
) -> None:
    feed = RequestFeed(workload, limit)
    by_id = {r.request_id: r for r in workload}
    running: dict[str, float] = {}
    released: list[str] = []
    now = 0.0
    while not feed.is_exhausted or running:
        times = [*running.values(), *([] if (due := feed.next_time()) is None else [due])]
        assert times, "unfinished, and nothing will ever happen"
        now = min(times)
        for name in [name for name, end in running.items() if end == now]:
            del running[name]
            feed.finish(name, now)
        for item in feed.pop_due(now):
            ready = by_id[item.request_id].arrival
            assert item.arrival == now >= ready
            if limit is None or not released:
                assert item.arrival == ready
            running[item.request_id] = now + durations[len(released)]
            released.append(item.request_id)
        assert limit is None or len(running) <= limit
    assert sorted(released) == sorted(by_id)


@given(workloads(), st.integers(1, 3))
def test_no_seat_is_free_while_a_request_is_ready(workload: list[WorkloadRequest], limit: int) -> None:
    feed = RequestFeed(workload, limit)
    now = 0.0
    while not feed.is_exhausted:
        now = max(now, feed.next_time() or 0.0)
        out = [item.request_id for item in feed.pop_due(now)]
        assert len(out) == limit or (feed.next_time() or math.inf) > now
        now += 1.0
        for name in out:
            feed.finish(name, now)


def test_equal_ids_are_rejected() -> None:
    with pytest.raises(ConfigError, match="request id 'a' occurs more than once"):
        RequestFeed([request("a"), request("b"), request("a")])
    with pytest.raises(ConfigError, match=r"max_concurrency must be at least 1, .* got 0"):
        RequestFeed([request("a")], 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"arrival": -1.0}, "arrival must be .* got -1.0"),
        ({"arrival": math.nan}, "arrival must be .* got nan"),
        ({"output_len": 0}, "output_len must be at least 1, got 0"),
        ({"max_tokens": 1}, "max_tokens must be at least output_len=2, got 1"),
        ({"prompt_token_ids": []}, "prompt_token_ids must hold at least one token"),
    ],
)
def test_invalid_requests_are_rejected(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"workload request 'a': {problem}"):
        request("a", **changes)


def test_max_output_len_is_the_declared_limit() -> None:
    assert request("a").max_output_len == 2
    assert request("a", max_tokens=9).max_output_len == 9


def test_a_turn_is_sent_after_the_end_of_the_one_before_and_begins_with_its_tokens() -> None:
    second = {"follows": "a", "continues": "a"}
    feed = RequestFeed([request("a", 1.0), request("b", 0.5, **second), request("c", 2.0, **second)])
    assert ids(feed.pop_due(9.0)) == ["a"]
    assert feed.next_time() is None
    assert not feed.is_exhausted
    feed.finish("a", 9.0, [1, 7, 8])
    assert feed.pop_due(9.4) == []
    (turn,) = feed.pop_due(9.5)
    assert (turn.arrival, turn.prompt_token_ids) == (9.5, [1, 7, 8, 1])
    (turn,) = feed.pop_due(12.0)
    assert (turn.arrival, turn.prompt_token_ids) == (11.0, [1, 7, 8, 1])
    assert feed.is_exhausted
    assert not feed._tokens


def test_a_turn_follows_a_request_before_it() -> None:
    for field in ("follows", "continues"):
        with pytest.raises(ConfigError, match=f"request 'a': {field}='b' must be the id of a request before it"):
            RequestFeed([request("a", **{field: "b"}), request("b")])
