"""Clusters in virtual time: one replica is the simulator, no request vanishes, and prefixes are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.simulated_cluster.cluster import ClusterResult, ClusterSimulation
from benchmarks.simulated_cluster.cluster_config import ClusterConfig, Failure
from benchmarks.simulated_cluster.conversation_feed import ConversationFeed
from benchmarks.simulated_cluster.simulated_replica import SimulatedReplica
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.cluster.replica_state import ReplicaState, RoutedPrompt
from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import EventList, RequestFinished
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, forced_request, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed

ENGINE = SimConfig(SchedulerConfig(512, max_num_seqs=4, max_num_batched_tokens=64), KVPool(64, 16, 512))


class LinearCost:
    """A step takes 10 ms, and 1 ms for each token."""

    def seconds(self, shape: StepShape) -> float:
        return 0.01 + 0.001 * shape.num_tokens


def conversations(count: int, turns: int = 4, gap: float = 0.3) -> ConversationFeed:
    found = []
    for number in range(count):
        first = WorkloadRequest(f"{number}.0", number * gap, [number % 250 + 1, *range(40)], 8)
        found.append([first, *(WorkloadRequest(f"{number}.{turn}", 0.5, [turn] * 10, 8) for turn in range(1, turns))])
    return ConversationFeed(found)


def run(workload: RequestFeed | list[WorkloadRequest], **options: Any) -> ClusterResult:
    return ClusterSimulation(workload, ClusterConfig(ENGINE, **options), LinearCost()).run()


def test_one_replica_is_the_simulator() -> None:
    events = EventList()
    alone = simulate(conversations(12, gap=0.05), ENGINE, LinearCost(), events)
    cluster = run(conversations(12, gap=0.05), replicas=1)
    firsts = [e.first_token_time - e.arrival_time for e in events.events if isinstance(e, RequestFinished)]
    assert cluster.seconds == pytest.approx(alone.seconds)
    assert sorted(cluster.ttfts) == pytest.approx(sorted(firsts))
    assert cluster.num_finished == alone.num_requests == 48


def test_a_turn_follows_the_end_of_the_one_before_it_and_carries_its_history() -> None:
    feed = ConversationFeed(
        [[WorkloadRequest("a", 1.0, [5, 6], 2), WorkloadRequest("b", 0.5, [7], 1), WorkloadRequest("c", 0.0, [8], 1)]]
    )
    assert [item.request_id for item in feed.pop_due(1.0)] == ["a"]
    assert feed.next_time() is None
    assert not feed.is_exhausted
    feed.finish("a", 4.0)
    assert feed.pop_due(4.4) == []
    assert feed.pop_due(5.0) == [WorkloadRequest("b", 4.5, bytes([5, 6, 0, 0, 7]), 1)]
    feed.finish("b", 6.0)
    assert feed.pop_due(6.0) == [WorkloadRequest("c", 6.0, bytes([5, 6, 0, 0, 7, 0, 8]), 1)]
    assert feed.is_exhausted


def test_the_router_finds_prefixes_that_a_random_choice_misses() -> None:
    routers = ("prefix", "pow2", "random")
    rates = {router: run(conversations(40), replicas=4, router=router).hit_rate for router in routers}
    assert rates["prefix"] > rates["pow2"] + 0.2
    assert rates["prefix"] > rates["random"] + 0.2


def test_stale_and_lost_updates_cost_hits_and_no_request() -> None:
    exact = run(conversations(40), replicas=4)
    for options in ({"update_delay": 5.0}, {"update_loss": 0.5}, {"update_loss": 1.0}):
        worse = run(conversations(40), replicas=4, **options)
        assert worse.num_finished == worse.num_requests == exact.num_requests
        assert worse.hit_rate <= exact.hit_rate + 0.01
    assert worse.hit_rate < exact.hit_rate - 0.1


def test_a_failure_loses_only_requests_with_output() -> None:
    workload = [WorkloadRequest(str(index), 0.0, [index + 1] * 30, 50) for index in range(24)]
    result = run(workload, replicas=2, failures=[Failure(0.5, 0, restart_seconds=1.0)])
    assert 0 < result.num_lost <= 4  # the seats of a replica
    assert result.num_resent >= 6
    assert result.num_finished + result.num_lost == result.num_requests == 24


def test_routers_with_stale_information_choose_different_replicas() -> None:
    """All replicas have the first block of all prompts. If all routers took the replica that is the best of all by the
    same old information, half of the requests would wait for 0.2 s."""
    workload = [
        WorkloadRequest(
            str(index), 0.025 * index, [*range(16), index % 250, index // 250, *range(14)], 20 + index * 7 % 20
        )
        for index in range(400)
    ]
    result = run(workload, replicas=8, num_routers=8, update_delay=0.5)
    assert result.num_finished == 400
    assert sorted(result.ttfts)[200] < 0.1


def test_an_idle_replica_has_all_blocks() -> None:
    """The last step of a request was scheduled while the request held nearly all blocks."""
    replica = SimulatedReplica(0, ENGINE, LinearCost(), 0.0)
    request = forced_request(WorkloadRequest("a", 0.0, [1] * 300, 100))
    replica.core.add(request)
    replica.requests["a"] = request
    replica.core.step()
    assert replica.free_blocks < ENGINE.pool.num_blocks
    while replica.core.has_work:
        replica.core.step()
    del replica.requests["a"]
    assert replica.free_blocks == ENGINE.pool.num_blocks


def test_invalid_configurations() -> None:
    good = ClusterConfig(ENGINE, 1)
    for options, message in (
        ({"replicas": 0}, "replicas"),
        ({"num_routers": 0}, "num_routers"),
        ({"router": "x"}, "router"),
        ({"update_loss": 2.0}, "loss"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(good, **options)


@settings(max_examples=30)
@given(
    st.integers(1, 4),
    st.floats(0, 1),
    st.floats(0, 2),
    st.lists(st.tuples(st.floats(0, 3), st.integers(0, 5), st.floats(0.1, 2)), max_size=4),
    st.sampled_from(["prefix", "pow2", "random"]),
    st.integers(1, 3),
)
def test_no_request_vanishes(
    replicas: int, loss: float, delay: float, failures: list[tuple[float, int, float]], router: Any, num_routers: int
) -> None:
    result = run(
        conversations(8, turns=3, gap=0.1),
        replicas=replicas,
        router=router,
        num_routers=num_routers,
        update_loss=loss,
        update_delay=delay,
        failures=[Failure(*values) for values in failures],
    )
    assert result.num_requests == result.num_finished + result.num_lost == 24


class PinnedTenant(ClusterSimulation):
    """Tenant "a" uses both of two replicas in turn, and "b", whose prompts have 33 tokens, only the first one."""

    def _choose(self, prompt: RoutedPrompt, candidates: Mapping[int, ReplicaState]) -> int:
        return 0 if prompt.num_tokens == 33 else self.result.num_requests % len(candidates)


def share_of_b(service_period: float | None) -> float:
    """The share of tenant "b" in the service of ten seconds in which both tenants wait on the first replica."""
    workload = [
        *(WorkloadRequest(f"a{index}", 0.0, [index % 250] * 32, 40, tenant="a") for index in range(200)),
        *(WorkloadRequest(f"b{index}", 0.5, [index % 250] * 33, 40, tenant="b") for index in range(100)),
    ]
    engine = replace(ENGINE, scheduler=replace(ENGINE.scheduler, scheduling_policy="fair"))
    config = ClusterConfig(engine, 2, service_period=service_period)
    result = PinnedTenant(workload, config, LinearCost()).run()
    assert result.num_finished == result.num_requests == 300
    before, after = result.service[4], result.service[14]
    return (after["b"] - before["b"]) / sum(after[tenant] - before[tenant] for tenant in "ab")


def test_tenants_share_the_cluster_and_not_each_replica() -> None:
    assert share_of_b(service_period=None) == pytest.approx(0.25, abs=0.05)
    assert share_of_b(service_period=0.25) == pytest.approx(0.5, abs=0.05)
