"""ClusterConfig: the replicas, routers and failures of a simulated cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from chairlift.cluster.usage_aggregator import SERVICE_PERIOD_SECONDS
from chairlift.errors import ConfigError
from chairlift.lab.sim.simulator import SimConfig

RoutingChoice = Literal["prefix", "pow2", "random"]
ROUTING_CHOICES: Final = ("prefix", "pow2", "random")


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica that dies `at` seconds after the start, and is replaced by an empty one after `restart_seconds`."""

    at: float
    replica: int
    restart_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A simulated cluster.

    Attributes:
        engine: the configuration of each replica.
        router: "prefix" is the router of `chairlift.cluster`, "pow2" takes the one with fewer requests of two random
            replicas (Ray Serve's default), "random" any.
        num_routers: number of routers, which receive the requests in turn. Each of them receives the requests of the
            others from the updates of the replicas.
        update_delay: seconds until an update of a replica reaches a router.
        update_loss: share of the updates that are lost.
        service_period: seconds between two exchanges of the service of tenants, under fair sharing; None: each replica
            shares only its own service.

    Raises:
        ConfigError: a value is outside its bounds.
    """

    engine: SimConfig
    replicas: int
    router: RoutingChoice = "prefix"
    num_routers: int = 1
    update_delay: float = 0.0
    update_loss: float = 0.0
    service_period: float | None = SERVICE_PERIOD_SECONDS
    failures: Sequence[Failure] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("replicas", "num_routers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.router not in ROUTING_CHOICES:
            raise ConfigError(f"router must be one of {', '.join(ROUTING_CHOICES)}, got {self.router!r}")
        if self.update_delay < 0 or not 0 <= self.update_loss <= 1:
            raise ConfigError("update_delay must be at least 0, and update_loss from 0 to 1")
