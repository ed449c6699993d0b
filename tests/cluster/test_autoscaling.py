"""The number of replicas from queued tokens, predicted times and batch use, and the options of a cluster."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes import make_engine, make_request

from chairlift.cluster.autoscaling import TARGET_BATCH_USE, QueueScaling, batch_use, predict_ttft
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.replica_state import ReplicaLoad
from chairlift.config import EngineConfig, SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, RequestArrived
from chairlift.lab.sim.simulator import SimConfig
from chairlift.observability.tracker import RequestTracker


@dataclass
class Context:
    current_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 5
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


@pytest.mark.parametrize(
    ("queued", "ttft", "use", "count"),
    [
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 1),
        ([900.0, 100.0], [0.9, 0.1], [0.1, 0.1], 1),
        ([2000.0, 1001.0], [0.5, 0.5], [0.5, 0.5], 4),
        ([100.0, 100.0], [2.5, 0.0], [0.5, 0.5], 3),
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.8, 0.7, 0.8], 3),
        ([0.0], [0.0], [2.5], 4),
        ([90_000.0], [90.0], [1.0], 5),
    ],
)
def test_the_largest_demand_decides_within_the_limits(
    queued: list[float], ttft: list[float], use: list[float], count: int
) -> None:
    policy = QueueScaling(target_queued_tokens=1000, target_ttft=1.0)
    values = {"queued_tokens": queued, "predicted_ttft": ttft, "batch_use": use}
    context = Context(aggregated_metrics={name: dict(zip("abc", each, strict=False)) for name, each in values.items()})
    assert policy(context) == (count, {})


def test_without_measurements_the_number_stays() -> None:
    policy = QueueScaling(1000, 1.0)
    assert policy(Context(aggregated_metrics=None)) == (2, {})
    assert policy(Context(current_num_replicas=9)) == (5, {})


def test_replicas_with_full_batches_stay_without_a_queue() -> None:
    full = {"a": 1.0, "b": 1.0, "c": 1.0}
    queues = {"queued_tokens": dict.fromkeys(full, 0.0), "predicted_ttft": dict.fromkeys(full, 0.0)}
    count, _ = QueueScaling(1000, 1.0)(Context(aggregated_metrics={**queues, "batch_use": full}))
    assert count == 4  # 3 / TARGET_BATCH_USE


def start_event(max_num_seqs: int = 4, num_blocks: int = 8) -> EngineStarted:
    return SimConfig(SchedulerConfig(64, max_num_seqs, 64), KVPool(num_blocks, 16, 64)).engine_started()


def test_the_batch_use_counts_siblings_and_blocks_of_an_engine() -> None:
    """Three siblings take three of four seats; a long request holds all but one of eight blocks."""
    core, _, _, events = make_engine(num_blocks=8, max_num_seqs=4)
    tracker = RequestTracker()
    tracker.emit(start_event(max_num_seqs=4, num_blocks=8))

    def use() -> float:
        for event in events.events:
            tracker.emit(event)
        events.events.clear()
        return batch_use(tracker)

    assert use() == 0.0
    for index in range(3):
        core.add(make_request(f"{index}", [1, 2], max_tokens=3, leader_id="0" if index else None))
    assert use() == 0.75
    while core.has_work:
        core.step()
    assert use() == 0.0
    core.add(make_request("long", list(range(28)), max_tokens=2))
    core.step()
    assert use() == 0.875
    core.abort("long")
    assert use() == 0.0
    core.add(make_request("lost", [1]))
    assert use() == 0.25
    tracker.emit(start_event())
    assert use() == 0.0, "a new engine process has no requests"


def test_the_predicted_time_is_that_of_the_steps_of_the_queue() -> None:
    assert predict_ttft(0, 64, lambda tokens: tokens / 10) == 0.0
    assert predict_ttft(130, 64, lambda tokens: 1 + tokens / 64) == pytest.approx(2 * 2 + 1 + 2 / 64)
    assert predict_ttft(130, 64, lambda tokens: None) == 0.0


def test_a_replica_reports_every_value_of_the_policy() -> None:
    pytest.importorskip("ray")
    from chairlift.cluster.ray_deployments import EngineDeployment

    tracker = RequestTracker()
    tracker.emit(start_event(max_num_seqs=4))
    tracker.emit(RequestArrived(0.0, "a", 1, 1))
    replica = SimpleNamespace(load=lambda: ReplicaLoad(7, 1, 0), predicted_ttft=lambda: 0.5, tracker=tracker)
    deployment: Any = SimpleNamespace(_replica=replica)
    values = asyncio.run(EngineDeployment.record_autoscaling_stats(deployment))
    assert values == {"queued_tokens": 7.0, "predicted_ttft": 0.5, "batch_use": 0.25}
    assert QueueScaling(7, 0.5)._targets == {"queued_tokens": 7, "predicted_ttft": 0.5, "batch_use": TARGET_BATCH_USE}


def test_ray_accepts_the_options_of_autoscaling() -> None:
    pytest.importorskip("ray")
    from ray.serve.config import AutoscalingConfig

    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        config = AutoscalingConfig.model_validate(
            ClusterOptions(replicas=1, max_replicas=3).scaling()["autoscaling_config"]
        )
    assert config.metrics_interval_s < config.look_back_period_s <= config.upscale_delay_s


def test_the_options_of_a_deployment() -> None:
    config = EngineConfig(num_threads=3)
    assert ClusterOptions(replicas=4).scaling() == {"num_replicas": 4}
    assert ClusterOptions(memory_per_replica=1 << 30).actor_options(config) == {"num_cpus": 3, "memory": 1 << 30}
    scaling = ClusterOptions(replicas=2, max_replicas=8).scaling()["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (2, 2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be at least 1, got 0"),
        ({"replicas": 2, "max_replicas": 1}, "max_replicas=1 must not be less than replicas=2"),
        ({"target_ttft": 0.0}, "target_ttft must be at least 0.001, got 0.0"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterOptions(**options)


def test_replicas_need_a_number_of_threads() -> None:
    with pytest.raises(ConfigError, match="num_threads is not set"):
        ClusterOptions().actor_options(EngineConfig())
