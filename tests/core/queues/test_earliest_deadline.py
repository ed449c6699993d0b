"""Earliest deadline first: the order, the requests that yield, and the bound of their wait."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.queues.earliest_deadline import TURN_OF_OTHERS, EarliestDeadlineQueue
from chairlift.events import RequestFinished
from chairlift.request import Request
from chairlift.slo import SLO
from chairlift.step_time import StepTime
from support.fakes import make_engine, make_request, run_to_end

TIME = StepTime(0.5, 0.1, 0.0, 10.0, 10.0)
"""A step takes half a second, and a tenth of a second for each token."""


def make_queue(step_time: StepTime | None = None) -> EarliestDeadlineQueue:
    """A queue at the time 0; the length of a request's salt is the number of its cached tokens."""
    queue = EarliestDeadlineQueue(8, lambda request: len(request.cache_salt or ""))
    queue.set_step_time(step_time)
    queue.begin_step(0.0)
    return queue


def waiting_request(arrival: int, ttft: float | None, time: float = 0.0, num_tokens: int = 4) -> Request:
    slo = None if ttft is None else SLO(ttft_ms=ttft * 1e3)
    request = make_request(f"r{arrival}", [1] * num_tokens, slo=slo)
    request.arrival_index, request.arrival_time = arrival, time
    return request


def admit(queue: EarliestDeadlineQueue) -> int:
    request = queue.pop()
    queue.record_admission(request)
    return request.arrival_index


def admit_all(queue: EarliestDeadlineQueue) -> list[int]:
    return [admit(queue) for _ in range(len(queue))]


def test_the_earliest_deadline_goes_first_and_requests_without_one_last() -> None:
    queue = make_queue()
    for arrival, ttft in enumerate([None, 9.0, 5.0, None, 7.0]):
        queue.push(waiting_request(arrival, ttft))
    assert admit_all(queue) == [2, 4, 1, 0, 3]
    assert queue.peek() is None


def test_a_request_that_cannot_meet_its_objective_yields() -> None:
    queue = make_queue(TIME)
    # 16 tokens take two steps of 0.5 s and 1.6 s for the tokens.
    queue.push(waiting_request(0, 2.5, num_tokens=16))
    queue.push(waiting_request(1, 2.6, num_tokens=16))
    queue.push(waiting_request(2, 3.0, num_tokens=16))
    cached = waiting_request(3, 2.5, num_tokens=16)
    cached.cache_salt = "x"
    queue.push(cached)
    assert admit_all(queue) == [3, 1, 2, 0]


def test_lateness_lasts_and_late_requests_are_in_the_order_of_their_arrival() -> None:
    queue = make_queue()
    for arrival, ttft in enumerate([4.0, 3.0, None, 50.0]):
        queue.push(waiting_request(arrival, ttft))
    queue.begin_step(5.0)
    assert admit_all(queue) == [3, 0, 1, 2]


def test_a_preempted_request_goes_first() -> None:
    queue = make_queue()
    preempted = waiting_request(1, None)
    preempted.num_preemptions = 1
    for request in (waiting_request(0, 1.0), preempted):
        queue.push(request)
    assert admit_all(queue) == [1, 0]


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from([None, 0.5, 2.0, 8.0, 30.0]), st.integers(0, 3)), min_size=1, max_size=60
    ),
    gap=st.sampled_from([0.0, 0.3, 2.0]),
    has_times=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_no_request_starves_and_a_waiting_request_is_always_served(
    arrivals: Sequence[tuple[float | None, int]], gap: float, has_times: bool
) -> None:
    """After its deadline, a request waits at most for TURN_OF_OTHERS admissions for itself and each older one."""
    queue = make_queue(TIME if has_times else None)
    now, num_admitted = 0.0, 0
    waiting: dict[int, Request] = {}
    deadlines: dict[int, float] = {}
    limits: dict[int, int] = {}

    def admit_one() -> None:
        nonlocal num_admitted
        head = queue.peek()
        assert head is queue.peek()
        keys = [queue.key(r) for r in waiting.values() if not queue._is_late(r)]
        if head is not None and queue.key(head)[0] < math.inf:
            assert queue.key(head) == min(keys)
        index = admit(queue)
        assert head is waiting.pop(index)
        num_admitted += 1
        assert num_admitted <= limits.pop(index, num_admitted), "it waited for longer than the bound"
        assert len(queue) == len(waiting)

    for index, (ttft, num_pops) in enumerate(arrivals):
        now += gap
        queue.begin_step(now)
        request = waiting[index] = waiting_request(index, ttft, now)
        deadlines[index] = -1.0 if ttft is None else now + ttft
        queue.push(request)
        for late in [r for r in waiting.values() if now > deadlines[r.arrival_index]]:
            num_older = sum(other < late.arrival_index for other in waiting)
            limits.setdefault(late.arrival_index, num_admitted + TURN_OF_OTHERS * (num_older + 1))
        for _ in range(min(num_pops, len(queue))):
            admit_one()
    while waiting:
        admit_one()
    assert queue.peek() is None


def test_the_turn_of_the_others_is_that_of_the_oldest() -> None:
    queue = make_queue()
    for arrival in range(2 * TURN_OF_OTHERS):
        queue.push(waiting_request(arrival, None if arrival in (4, 5) else 50.0))
    order = admit_all(queue)
    assert (order.index(4), order.index(5)) == (TURN_OF_OTHERS - 1, 2 * TURN_OF_OTHERS - 1)


def test_an_engine_admits_by_deadline() -> None:
    core, _, _, events = make_engine(max_num_seqs=1, scheduling_policy="edf")
    for name, ttft in (("none", None), ("late", 9000), ("soon", 5000)):
        core.add(make_request(name, [1], max_tokens=2, slo=None if ttft is None else SLO(ttft)))
    run_to_end(core)
    assert [e.request_id for e in events.events if isinstance(e, RequestFinished)] == ["soon", "late", "none"]


def test_the_head_is_admitted_though_its_allocation_changes_what_is_cached() -> None:
    num_cached = {"r0": 16}
    queue = EarliestDeadlineQueue(8, lambda request: num_cached.get(request.request_id, 0))
    queue.set_step_time(TIME)
    for arrival in range(2):
        queue.push(waiting_request(arrival, 1.0 + arrival * 9, num_tokens=16))
    queue.begin_step(0.0)
    head = queue.peek()
    num_cached.clear()
    assert queue.pop() is head is not None
    assert head.arrival_index == 0


def test_a_beam_that_joins_its_leader_does_not_count_as_an_admission() -> None:
    queue = make_queue()
    for arrival in range(TURN_OF_OTHERS + 1):
        queue.push(waiting_request(arrival, 50.0 if arrival else None))
    beam = make_request("beam", [1], leader_id="leader")
    beam.sampling_params = dataclasses.replace(beam.sampling_params, n=2, use_beam_search=True)
    order = []
    for _ in range(TURN_OF_OTHERS):
        order.append(admit(queue))
        queue.record_admission(beam)
    assert order[-1] == 0
