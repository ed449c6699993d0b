"""The virtual token counter: charges, the order of tenants, and the reported wait reasons."""

from __future__ import annotations

from chairlift.core.queues.fair_queue import FairQueue
from chairlift.events import RequestFinished, RequestWaiting
from chairlift.request import Request, RequestStatus
from support.fakes import make_engine, make_request, run_to_end


def waiting_request(name: str, tenant: str, prompt_len: int = 10, arrival: int = 0, priority: int = 0) -> Request:
    request = make_request(name, list(range(prompt_len)), tenant=tenant, priority=priority)
    request.arrival_index = arrival
    return request


def admit(queue: FairQueue) -> str:
    request = queue.pop()
    request.status = RequestStatus.RUNNING
    queue.record_admission(request)
    return request.request_id


def test_the_tenant_with_the_smallest_counter_goes_first() -> None:
    queue = FairQueue({})
    for index in range(3):
        queue.push(waiting_request(f"a{index}", "a", 10, index))
    queue.push(waiting_request("b0", "b", 25, 3))
    queue.push(waiting_request("b1", "b", 5, 4))
    assert [admit(queue) for _ in range(5)] == ["a0", "b0", "a1", "a2", "b1"]
    assert (queue.counter("a"), queue.counter("b")) == (30.0, 30.0)
    assert len(queue) == 0
    assert queue.peek() is None


def test_output_tokens_cost_twice_and_weights_divide() -> None:
    queue = FairQueue({"a": 4.0})
    first, second = waiting_request("a0", "a", 8), waiting_request("b0", "b", 8, 1)
    for request in (first, second):
        queue.push(request)
    admit(queue)
    admit(queue)
    queue.record_sampling([first, second])
    assert (queue.counter("a"), queue.counter("b")) == (2.5, 10.0)


def test_within_a_tenant_priority_decides_and_then_arrival() -> None:
    queue = FairQueue({})
    for arrival, (name, priority) in enumerate((("late", 2), ("first", 0), ("next", 0))):
        queue.push(waiting_request(name, "a", arrival=arrival, priority=priority))
    assert [admit(queue) for _ in range(3)] == ["first", "next", "late"]


def test_a_tenant_saves_up_no_service_while_it_sends_nothing() -> None:
    queue = FairQueue({})
    for index in range(8):
        queue.push(waiting_request(f"a{index}", "a", 10, index))
    for _ in range(6):
        admit(queue)
    queue.push(waiting_request("b0", "b", 10, 8))
    assert queue.counter("b") == queue.counter("a") == 60.0
    assert [admit(queue) for _ in range(3)] == ["a6", "b0", "a7"]


def test_after_an_empty_queue_the_last_tenant_sets_the_floor() -> None:
    queue = FairQueue({})
    queue.push(waiting_request("a0", "a", 50))
    admit(queue)
    queue.push(waiting_request("b0", "b", 10, 1))
    assert queue.counter("b") == 50.0


def test_an_aborted_request_leaves_and_its_tenant_with_it() -> None:
    queue = FairQueue({})
    gone, stays = waiting_request("a0", "a"), waiting_request("b0", "b", arrival=1)
    queue.push(gone)
    queue.push(stays)
    gone.status = RequestStatus.FINISHED
    queue.discard(gone)
    assert len(queue) == 1
    assert queue.peek() is stays


def test_cached_tokens_and_recomputed_ones_are_free() -> None:
    queue = FairQueue({})
    request = waiting_request("a0", "a", 10)
    request.num_computed_tokens = 8
    queue.record_admission(request)
    assert queue.counter("a") == 2.0
    request.num_preemptions = 1
    queue.record_admission(request)
    assert queue.counter("a") == 2.0
    assert queue.peek() is None


def test_the_tenant_with_the_largest_counter_is_preempted() -> None:
    core, _, _, events = make_engine(
        num_blocks=8, block_size=1, max_num_seqs=2, scheduling_policy="fair", enable_prefix_caching=False
    )
    core.add(make_request("a", [1, 2, 3, 4], max_tokens=4, tenant="a"))
    core.add(make_request("b", [5], max_tokens=6, tenant="b"))
    run_to_end(core)
    preemptions = {e.request_id: e.num_preemptions for e in events.events if isinstance(e, RequestFinished)}
    assert preemptions == {"a": 1, "b": 0}


def test_the_wait_for_the_turn_of_another_tenant_is_reported() -> None:
    core, _, _, events = make_engine(max_num_seqs=1, max_num_batched_tokens=8, scheduling_policy="fair")
    core.add(make_request("a0", [1, 2], max_tokens=4, tenant="a"))
    core.add(make_request("a1", [3, 4], max_tokens=2, tenant="a"))
    core.step()
    core.add(make_request("b0", [5], max_tokens=2, tenant="b"))
    run_to_end(core)
    reported = [(e.request_id, e.reason) for e in events.events if isinstance(e, RequestWaiting)]
    assert reported == [("a1", "seats"), ("a1", "fairness"), ("b0", "seats"), ("a1", "seats")]
    waited = {e.request_id: e.steps_waited for e in events.events if isinstance(e, RequestFinished)}
    assert waited["a0"] == {}
    assert set(waited["a1"]) == {"seats", "fairness"}


def test_remote_service_counts_like_service_of_this_engine() -> None:
    queue = FairQueue({"a": 2.0})
    queue.record_remote_service({"a": 10.0, "b": 10.0})
    assert (queue.counter("a"), queue.counter("b")) == (5.0, 10.0)


def test_a_tenant_that_paused_gains_nothing_over_one_that_is_served_elsewhere() -> None:
    queue = FairQueue({})
    queue.record_remote_service({"a": 100.0})
    queue.push(waiting_request("b1", "b"))
    assert queue.counter("b") == 100.0
    queue.record_remote_service({})
    queue.push(waiting_request("c1", "c"))
    assert queue.counter("c") == 100.0
