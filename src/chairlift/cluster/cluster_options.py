"""The options of a cluster: the number of replicas, the resources of each, and how Ray Serve supervises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.options import check_options, option
from chairlift.system.memory_amounts import parse_memory

AUTOSCALING_PERIOD: Final = 1.0
AUTOSCALING_WINDOW: Final = 4.0
"""Seconds of which Ray averages the values of replicas. Its default of 30 s would delay the start of replicas."""

DEFAULT_REPLICAS: Final = 2


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How many replicas run, and with what."""

    OPTION_GROUP: ClassVar = "Cluster"

    replicas: int = option(DEFAULT_REPLICAS, "Number of replicas; with autoscaling the number at the start.", minimum=1)
    min_replicas: int | None = option(
        None, "Smallest number of replicas of autoscaling. Default: replicas, which disables it.", minimum=1
    )
    max_replicas: int | None = option(
        None, "Largest number of replicas of autoscaling. Default: replicas, which disables it.", minimum=1
    )
    ingresses: int = option(1, "Number of processes that serve HTTP.", minimum=1)
    target_queued_tokens: int = option(
        4096, "Prompt tokens that may wait in a replica before another one is started.", minimum=1
    )
    target_ttft: float = option(
        2.0, "Seconds of the predicted time to first token before another replica is started.", minimum=0.001
    )
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
        start = f"replicas={self.replicas}, the number at the start (default: {DEFAULT_REPLICAS})"
        if self.least > self.replicas:
            raise ConfigError(f"min_replicas={self.least} must not be greater than {start}: increase replicas")
        if self.most < self.replicas:
            raise ConfigError(f"max_replicas={self.most} must not be less than {start}: reduce replicas")

    @property
    def least(self) -> int:
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        return self.replicas if self.max_replicas is None else self.max_replicas

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

    def scaling(self) -> dict[str, Any]:
        """The options of the deployment that determine the number of replicas."""
        if self.least == self.most:
            return {"num_replicas": self.replicas}
        return {
            "autoscaling_config": {
                "min_replicas": self.least,
                "initial_replicas": self.replicas,
                "max_replicas": self.most,
                "metrics_interval_s": AUTOSCALING_PERIOD,
                "look_back_period_s": AUTOSCALING_WINDOW,
                "upscale_delay_s": 5.0,
                "downscale_delay_s": 60.0,
                "policy": {
                    "policy_function": "chairlift.cluster.autoscaling:QueueScaling",
                    "policy_kwargs": {
                        "target_queued_tokens": self.target_queued_tokens,
                        "target_ttft": self.target_ttft,
                    },
                },
            }
        }
