"""The virtual token counter: charges, the order of tenants, and the reported wait reasons."""

from __future__ import annotations

from chairlift.core.scheduling_policies import FairPolicy, FairQueue
from chairlift.events import RequestFinished, RequestWaiting
from chairlift.request import Request, RequestStatus
from fakes import make_engine, make_request, run_to_end


def waiting_request(name: str, tenant: str, prompt_len: int = 10, arrival: int = 0, priority: int = 0) -> Request:
    request = make_request(name, list(range(prompt_len)), tenant=tenant, priority=priority)
    request.arrival_index = arrival
    return request


def admit(policy: FairPolicy, queue: FairQueue) -> str:
    request = queue.pop()
    request.status = RequestStatus.RUNNING
    policy.record_admission(request)
    return request.request_id


def fair_queue(weights: dict[str, float] | None = None) -> tuple[FairPolicy, FairQueue]:
    policy = FairPolicy(weights)
    queue = policy.make_queue()
    assert isinstance(queue, FairQueue)
    return policy, queue


def test_the_tenant_with_the_smallest_counter_goes_first() -> None:
    policy, queue = fair_queue()
    for index in range(3):
        queue.push(waiting_request(f"a{index}", "a", 10, index))
    queue.push(waiting_request("b0", "b", 25, 3))
    queue.push(waiting_request("b1", "b", 5, 4))
    assert [admit(policy, queue) for _ in range(5)] == ["a0", "b0", "a1", "a2", "b1"]
    assert (policy.counter("a"), policy.counter("b")) == (30.0, 30.0)
    assert len(queue) == 0
    assert queue.peek() is None


def test_output_tokens_cost_twice_and_weights_divide() -> None:
    policy, queue = fair_queue({"a": 4.0})
    first, second = waiting_request("a0", "a", 8), waiting_request("b0", "b", 8, 1)
    for request in (first, second):
        queue.push(request)
    admit(policy, queue)
    admit(policy, queue)
    policy.record_sampling([first, second])
    assert (policy.counter("a"), policy.counter("b")) == (2.5, 10.0)


def test_within_a_tenant_priority_decides_and_then_arrival() -> None:
    policy, queue = fair_queue()
    for arrival, (name, priority) in enumerate((("late", 2), ("first", 0), ("next", 0))):
        queue.push(waiting_request(name, "a", arrival=arrival, priority=priority))
    assert [admit(policy, queue) for _ in range(3)] == ["first", "next", "late"]


def test_a_tenant_saves_up_no_service_while_it_sends_nothing() -> None:
    policy, queue = fair_queue()
    for index in range(8):
        queue.push(waiting_request(f"a{index}", "a", 10, index))
    for _ in range(6):
        admit(policy, queue)
    queue.push(waiting_request("b0", "b", 10, 8))
    assert policy.counter("b") == policy.counter("a") == 60.0
    assert [admit(policy, queue) for _ in range(3)] == ["a6", "b0", "a7"]


def test_after_an_empty_queue_the_last_tenant_sets_the_floor() -> None:
    policy, queue = fair_queue()
    queue.push(waiting_request("a0", "a", 50))
    admit(policy, queue)
    queue.push(waiting_request("b0", "b", 10, 1))
    assert policy.counter("b") == 50.0


def test_an_aborted_request_leaves_and_its_tenant_with_it() -> None:
    _, queue = fair_queue()
    gone, stays = waiting_request("a0", "a"), waiting_request("b0", "b", arrival=1)
    queue.push(gone)
    queue.push(stays)
    gone.status = RequestStatus.FINISHED
    queue.discard(gone)
    assert len(queue) == 1
    assert queue.peek() is stays


def test_cached_tokens_and_recomputed_ones_are_free() -> None:
    policy, queue = fair_queue()
    request = waiting_request("a0", "a", 10)
    request.num_computed_tokens = 8
    policy.record_admission(request)
    assert policy.counter("a") == 2.0
    request.num_preemptions = 1
    policy.record_admission(request)
    assert policy.counter("a") == 2.0
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
    policy = FairPolicy({"a": 2.0})
    policy.record_remote_service({"a": 10.0, "b": 10.0})
    assert (policy.counter("a"), policy.counter("b")) == (5.0, 10.0)


def test_a_tenant_that_paused_gains_nothing_over_one_that_is_served_elsewhere() -> None:
    policy, queue = fair_queue()
    policy.record_remote_service({"a": 100.0})
    queue.push(waiting_request("b1", "b"))
    assert policy.counter("b") == 100.0
    policy.record_remote_service({})
    queue.push(waiting_request("c1", "c"))
    assert policy.counter("c") == 100.0
