"""The options of a cluster, and the resources of its replicas."""

from __future__ import annotations

import pytest

from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError


def test_resources_and_limits_of_replicas() -> None:
    options = ClusterOptions(memory_per_replica=1 << 30)
    assert options.actor_options(EngineConfig(num_threads=3)) == {"num_cpus": 3, "memory": 1 << 30}
    with pytest.raises(ConfigError, match="replicas must be at least 1, got 0"):
        ClusterOptions(replicas=0)
    with pytest.raises(ConfigError, match="num_threads is not set"):
        ClusterOptions().actor_options(EngineConfig())
