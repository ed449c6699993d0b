"""Deficit longest prefix match: the preferred prefixes, refills, and overtaken requests."""

from __future__ import annotations

import pytest

from chairlift.core.queues import prefix_fair_queue
from chairlift.core.queues.prefix_fair_queue import PrefixFairQueue
from chairlift.events import RequestFinished
from chairlift.request import Request
from support.fakes import make_engine, make_request, run_to_end

CACHED: dict[str, int] = {}


def num_cached(request: Request) -> int:
    return CACHED.get(request.request_id, 0)


@pytest.fixture(autouse=True)
def nothing_cached() -> None:
    CACHED.clear()


def make_queue(quantum: float = 100.0, weights: dict[str, float] | None = None) -> PrefixFairQueue:
    return PrefixFairQueue(weights or {}, num_cached, quantum)


def push(
    queue: PrefixFairQueue, name: str, tenant: str, arrival: int, prompt_len: int = 10, cached: int = 0
) -> Request:
    request = make_request(name, list(range(prompt_len)), tenant=tenant)
    request.arrival_index = arrival
    CACHED[name] = cached
    queue.push(request)
    return request


def admit(queue: PrefixFairQueue) -> str:
    request = queue.pop()
    request.num_computed_tokens = num_cached(request)
    queue.record_admission(request)
    return request.request_id


def test_the_longest_cached_prefix_goes_first_and_then_the_earlier_arrival() -> None:
    queue = make_queue()
    for arrival, (name, cached) in enumerate([("new", 0), ("short", 4), ("long", 8), ("also-short", 4)]):
        push(queue, name, "ab"[arrival % 2], arrival, cached=cached)
    assert [admit(queue) for _ in range(4)] == ["long", "short", "also-short", "new"]
    assert queue.peek() is None
    assert len(queue) == 0


def test_a_tenant_without_a_deficit_waits_for_the_others() -> None:
    queue = make_queue(quantum=15)
    for arrival in range(4):
        push(queue, f"hit{arrival}", "a", arrival, cached=0)
    push(queue, "other", "b", 4)
    CACHED.update({f"hit{index}": 1 for index in range(4)})
    assert [admit(queue) for _ in range(4)] == ["hit0", "hit1", "other", "hit2"]
    assert (queue.deficit("a"), queue.deficit("b")) == (3.0, 5.0)


def test_quanta_are_given_until_a_waiting_tenant_has_a_deficit() -> None:
    queue = make_queue(quantum=10)
    request = push(queue, "a0", "a", 0)
    queue.record_sampling([request] * 50)  # a deficit of -100
    push(queue, "b0", "b", 1)
    admit(queue)
    assert (queue.deficit("a"), queue.deficit("b")) == (-90.0, 0.0)
    assert admit(queue) == "a0"
    assert (queue.deficit("a"), queue.deficit("b")) == (0.0, 10.0)


def test_a_tenant_saves_up_no_more_than_a_quantum() -> None:
    queue = make_queue(quantum=10)
    push(queue, "b0", "b", 0)
    admit(queue)
    for arrival in range(20):
        push(queue, f"a{arrival}", "a", arrival)
        admit(queue)
    assert queue.deficit("b") == 10.0


def test_output_tokens_cost_twice_and_weights_divide() -> None:
    queue = make_queue(weights={"a": 4.0})
    request = push(queue, "a0", "a", 0, prompt_len=8)
    admit(queue)
    queue.record_sampling([request])
    assert queue.deficit("a") == 100.0 - (8 + 2) / 4


def test_the_oldest_request_of_a_tenant_is_overtaken_by_a_limited_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fair_queue, "MAX_OVERTAKEN", 3)
    queue = make_queue(quantum=1e6)
    push(queue, "old", "a", 0)
    admitted = []
    for arrival in range(1, 9):
        push(queue, f"hit{arrival}", "a", arrival, cached=8)
        admitted.append(admit(queue))
    assert admitted.index("old") == 3


def test_a_limited_number_of_prefixes_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fair_queue, "MAX_COMPARED", 4)
    queue = make_queue()
    for arrival in range(6):
        push(queue, f"a{arrival}", "a", arrival, cached=arrival)
    push(queue, "b0", "b", 6)
    assert admit(queue) == "a1", "two of each tenant"


def test_the_head_stays_while_the_queue_does_not_change() -> None:
    queue = make_queue()
    push(queue, "a0", "a", 0)
    push(queue, "a1", "a", 1)
    head = queue.peek()
    CACHED["a1"] = 8
    assert queue.peek() is head
    push(queue, "a2", "a", 2)
    assert queue.pop().request_id == "a1"


def test_hits_of_a_tenant_are_kept_together() -> None:
    """Two conversations in turns: dlpm admits the requests of one after another, while their prefix is cached."""

    def num_cached_tokens(policy: str) -> int:
        core, _, _, events = make_engine(num_blocks=14, max_num_seqs=1, scheduling_policy=policy)
        for index in range(8):
            core.add(make_request(f"r{index}", [index % 2] * 40 + [index], 2, tenant="ab"[index // 4]))
        run_to_end(core)
        return sum(event.num_cached_tokens for event in events.events if isinstance(event, RequestFinished))

    assert num_cached_tokens("dlpm") > num_cached_tokens("fair")


def test_the_limit_of_compared_prefixes_holds_for_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fair_queue, "MAX_COMPARED", 2)
    queue = make_queue()
    requests = [push(queue, f"r{tenant}", tenant, arrival, cached=arrival) for arrival, tenant in enumerate("abcd")]
    queue.record_sampling([requests[0], requests[3]])
    assert queue.peek() is requests[2], "b and c have the largest deficits"


def test_an_aborted_request_overtakes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_fair_queue, "MAX_OVERTAKEN", 1)
    queue = make_queue()
    push(queue, "old", "a", 0)
    aborted = push(queue, "aborted", "a", 1)
    push(queue, "hit", "a", 2, cached=8)
    queue.discard(aborted)
    assert admit(queue) == "hit"
    assert admit(queue) == "old"
    assert not queue._overtaken
