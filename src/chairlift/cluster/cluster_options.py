"""The options of a cluster: the number of replicas, the resources of each, and how Ray Serve supervises them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from chairlift.cluster.cluster_view import ROUTING_POLICIES, RoutingPolicy
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError

AUTOSCALING_PERIOD: Final = 1.0
AUTOSCALING_WINDOW: Final = 4.0
"""Seconds of which Ray averages the values of replicas. Its default of 30 s would delay the start of replicas."""

DEFAULT_REPLICAS: Final = 2

REQUIRED_COUNTS: Final = ("replicas", "ingresses", "target_queued_tokens")
COUNTS: Final = (*REQUIRED_COUNTS, "min_replicas", "max_replicas", "memory_per_replica")


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How many replicas run, and with what.

    Attributes:
        replicas: number of replicas; with autoscaling the number at the start.
        min_replicas, max_replicas: the limits of autoscaling; equal numbers disable it.
        ingresses: number of processes that serve HTTP.
        router: "prefix", or "pow2" to compare with (see `ClusterView.route`).
        target_queued_tokens: prompt tokens that may wait in a replica before another one is started.
        target_ttft: seconds of the predicted time to first token before another one is started.
        memory_per_replica: bytes that Ray reserves for a replica; None reserves none.
        drain_timeout: seconds in which a replica that is removed finishes its requests.
        health_check_period, health_check_timeout: seconds between two health checks, and until one has failed.
        watchdog_timeout: see `ProcessClient`.
    """

    replicas: int = DEFAULT_REPLICAS
    min_replicas: int | None = None
    max_replicas: int | None = None
    ingresses: int = 1
    router: RoutingPolicy = "prefix"
    target_queued_tokens: int = 4096
    target_ttft: float = 2.0
    memory_per_replica: int | None = None
    drain_timeout: float = 600.0
    health_check_period: float = 2.0
    health_check_timeout: float = 20.0
    watchdog_timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if (value is not None or name in REQUIRED_COUNTS) and (not _is_number(value, int) or value < 1):
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r:.80}")
        if self.router not in ROUTING_POLICIES:
            raise ConfigError(f"router must be one of {', '.join(ROUTING_POLICIES)}, got {self.router!r}")
        for name in ("target_ttft", "drain_timeout", "health_check_period", "health_check_timeout"):
            value = getattr(self, name)
            if not _is_number(value, int | float) or not value > 0:
                raise ConfigError(f"{name} must be a number of seconds > 0, got {value!r:.80}")
        if not _is_number(self.watchdog_timeout, int | float) or not self.watchdog_timeout >= 0:
            raise ConfigError(f"watchdog_timeout must be a number of seconds >= 0, got {self.watchdog_timeout!r:.80}")
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


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
