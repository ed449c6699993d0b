"""Fair queueing in virtual time: the bounds that the papers of VTC and DLPM prove, at every step of random loads."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import pytest
from benchmarks.waiting_service import WaitingServiceTally, service_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_workloads import ConstantCost

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.core.queues import queue_selection
from chairlift.core.queues.prefix_fair_queue import PrefixFairQueue
from chairlift.events import Event, Step
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request

BLOCK_SIZE = 4
NUM_BLOCKS = 24
MAX_MODEL_LEN = 48
MAX_NUM_SEQS = 6
TENANTS = "abc"
QUANTUM = 20.0
"""Q of DLPM: about the service of one request of these loads."""


def bound(requests: list[WorkloadRequest], weights: dict[str, float]) -> float:
    """Returns the bound of VTC for tenants with these weights."""
    of_equal_weights = service_bound("fair", requests, NUM_BLOCKS * BLOCK_SIZE, MAX_NUM_SEQS)
    assert of_equal_weights is not None
    return of_equal_weights / min([1.0, *weights.values()])


def load(seed: int, sizes: dict[str, tuple[int, int, int]], gap: float) -> list[WorkloadRequest]:
    """Returns requests of each tenant; `sizes` has their number, maximum prompt length and maximum output length."""
    rng = random.Random(seed)
    requests = []
    for tenant, (count, longest_prompt, longest_output) in sizes.items():
        time = 0.0
        for index in range(count):
            prompt = [rng.randrange(10_000) for _ in range(rng.randint(1, longest_prompt))]
            output_len = rng.randint(1, longest_output)
            time += rng.expovariate(1 / gap) if gap else 0.0
            requests.append(
                WorkloadRequest(
                    f"{tenant}{index}", time, prompt, output_len, MAX_MODEL_LEN - len(prompt), tenant=tenant
                )
            )
    return sorted(requests, key=lambda item: item.arrival)


class Listener:
    """Calls a function with every event."""

    def __init__(self, function: Callable[[Event], None]) -> None:
        self.emit = function


def run(
    requests: list[WorkloadRequest],
    policy: str = "fair",
    weights: dict[str, float] | None = None,
    *,
    kv: str = "paged",
    batching: str = "continuous",
    listen: Callable[[Event], None] | None = None,
) -> WaitingServiceTally:
    limits = SchedulerConfig(
        MAX_MODEL_LEN,
        MAX_NUM_SEQS,
        max_num_batched_tokens=16,
        scheduling_policy=policy,
        batching=batching,
        static_batch_size=4,
        tenant_weights=weights or {},
    )
    log = WaitingServiceTally(weights=weights)
    config = SimConfig(limits, KVPool(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, kv))
    result = simulate(requests, config, ConstantCost(), log if listen is None else Listener(listen))
    assert not result.rejected
    return log


SIZES = st.fixed_dictionaries(
    {tenant: st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 24)) for tenant in TENANTS}
)
WEIGHTS = st.fixed_dictionaries({}, optional={tenant: st.sampled_from([0.5, 2.0, 4.0]) for tenant in TENANTS})


class SmallQuantum(PrefixFairQueue):
    def __init__(self, weights: Mapping[str, float], num_cached_tokens: Callable[[Request], int]) -> None:
        super().__init__(weights, num_cached_tokens, QUANTUM)


@given(
    seed=st.integers(0, 1 << 30),
    sizes=SIZES,
    gap=st.sampled_from([0.0, 0.5, 3.0]),
    weights=WEIGHTS,
    kv=st.sampled_from(["paged", "exact", "max", "oracle", "pow2"]),
    batching=st.sampled_from(["continuous", "static"]),
    policy=st.sampled_from(["fair", "dlpm"]),
)
@settings(max_examples=50)
def test_service_of_waiting_tenants_stays_within_the_published_bound(
    seed: int,
    sizes: dict[str, tuple[int, int, int]],
    gap: float,
    weights: dict[str, float],
    kv: str,
    batching: str,
    policy: str,
) -> None:
    requests = load(seed, sizes, gap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(queue_selection.QUEUES, "dlpm", SmallQuantum)
        log = run(requests, policy, weights, kv=kv, batching=batching)
    assert log.largest_waiting_gap <= bound(requests, weights) + (2 * QUANTUM if policy == "dlpm" else 0)


def test_first_come_first_served_exceeds_the_bound() -> None:
    requests = load(3, {"a": (200, 24, 24), "b": (1, 24, 24)}, 0.0)
    requests += [WorkloadRequest(f"late{index}", 0.5, [index] * 9, 9, tenant="b") for index in range(100)]
    assert run(requests, "fcfs").largest_waiting_gap > bound(requests, {})
    assert run(requests, "fair").largest_waiting_gap <= bound(requests, {})


def test_the_bound_holds_with_preemptions() -> None:
    requests = load(5, {"a": (120, 2, 46), "b": (120, 2, 46)}, 0.0)
    log, num_preempted = WaitingServiceTally(), 0

    def listen(event: Event) -> None:
        nonlocal num_preempted
        log.emit(event)
        num_preempted += len(event.preempted) if isinstance(event, Step) else 0

    run(requests, listen=listen)
    assert num_preempted > 20
    assert log.largest_waiting_gap <= bound(requests, {})


def test_service_is_proportional_to_the_weight() -> None:
    requests = load(7, {"a": (150, 12, 12), "b": (150, 12, 12)}, 0.0)
    weights = {"a": 2.0}
    log = WaitingServiceTally(weights=weights)
    while_both_wait: list[tuple[float, float]] = []

    def listen(event: Event) -> None:
        log.emit(event)
        if isinstance(event, Step) and log.waiting["a"] and log.waiting["b"]:
            while_both_wait.append((2 * log.services["a"], log.services["b"]))

    run(requests, weights=weights, listen=listen)
    service_a, service_b = while_both_wait[-1]
    assert service_a / service_b == pytest.approx(2.0, rel=0.1)
