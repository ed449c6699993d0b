"""The number of replicas from queued tokens and predicted times, and the options of a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from chairlift.cluster.autoscaling import QueueScaling
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError


@dataclass
class Context:
    current_num_replicas: int = 2
    capacity_adjusted_min_replicas: int = 1
    capacity_adjusted_max_replicas: int = 5
    aggregated_metrics: dict[str, dict[str, float]] | None = field(default_factory=dict)


@pytest.mark.parametrize(
    ("queued", "ttft", "count"),
    [
        ({"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}, 1),
        ({"a": 900.0, "b": 100.0}, {"a": 0.9, "b": 0.1}, 1),
        ({"a": 2000.0, "b": 1001.0}, {"a": 0.5, "b": 0.5}, 4),
        ({"a": 100.0, "b": 100.0}, {"a": 2.5, "b": 0.0}, 3),
        ({"a": 90_000.0}, {"a": 90.0}, 5),
    ],
)
def test_the_larger_demand_decides_within_the_limits(
    queued: dict[str, float], ttft: dict[str, float], count: int
) -> None:
    policy = QueueScaling(target_queued_tokens=1000, target_ttft=1.0)
    context = Context(aggregated_metrics={"queued_tokens": queued, "predicted_ttft": ttft})
    assert policy(context) == (count, {})


def test_without_measurements_the_number_stays() -> None:
    policy = QueueScaling(1000, 1.0)
    assert policy(Context(aggregated_metrics=None)) == (2, {})
    assert policy(Context(current_num_replicas=9)) == (5, {})


def test_the_options_of_a_deployment() -> None:
    config = EngineConfig(num_threads=3)
    assert ClusterOptions(replicas=4).scaling() == {"num_replicas": 4}
    assert ClusterOptions(memory_per_replica=1 << 30).actor_options(config) == {"num_cpus": 3, "memory": 1 << 30}
    scaling = ClusterOptions(replicas=2, max_replicas=8).scaling()["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (2, 2, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas must be an integer of at least 1, got 0"),
        ({"replicas": 2, "max_replicas": 1}, "min_replicas=2, replicas=2 and max_replicas=1 must increase"),
        ({"target_ttft": 0.0}, "target_ttft must be a number of seconds > 0, got 0.0"),
    ],
)
def test_invalid_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterOptions(**options)


def test_replicas_need_a_number_of_threads() -> None:
    with pytest.raises(ConfigError, match="num_threads is not set"):
        ClusterOptions().actor_options(EngineConfig())
