"""The options of a cluster: the number of replicas, the resources of each, and how Ray Serve supervises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.options import check_options, option
from chairlift.system.memory_amounts import parse_memory


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How many replicas run, and with what."""

    OPTION_GROUP: ClassVar = "Cluster"

    replicas: int = option(2, "Number of replicas.", minimum=1)
    ingresses: int = option(1, "Number of processes that serve HTTP.", minimum=1)
    memory_per_replica: int | None = option(
        None, "Memory that Ray reserves for a replica, such as 8GiB. Default: none is reserved.", parse=parse_memory
    )
    drain_timeout: float = option(
        600.0, "Seconds in which a replica that is removed finishes its requests.", minimum=0.001
    )
    health_check_period: float = option(2.0, "Seconds between two health checks.", minimum=0.001)
    health_check_timeout: float = option(20.0, "Seconds until a health check has failed.", minimum=0.001)
    watchdog_timeout: float = option(
        120.0, "As for chairlift serve, whose watchdog-timeout replaces this default if it is set.", minimum=0.0
    )

    def __post_init__(self) -> None:
        check_options(self)

    def actor_options(self, config: EngineConfig) -> dict[str, Any]:
        """The resources that Ray reserves for a replica: its CPU threads or its GPU.

        Raises:
            ConfigError: the number of threads is not set, so that Ray cannot know how many replicas a machine has room
                for; or an option names a file that all replicas would write.
        """
        for name in ("event_log", "record_trace"):
            if (path := getattr(config, name)) is not None:
                raise ConfigError(f"{name}={path} is one file, and every replica would write it: remove {name}")
        if config.device != "cpu":
            options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1}
        elif config.num_threads is None:
            raise ConfigError("num_threads is not set: set it to the CPU threads of one replica")
        else:
            options = {"num_cpus": config.num_threads}
        if self.memory_per_replica is not None:
            options["memory"] = self.memory_per_replica
        return options
