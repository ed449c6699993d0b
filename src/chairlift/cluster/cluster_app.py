"""The HTTP application of an ingress: the application of a server, over the replicas of each model, which the API shows
with their metrics, requests and events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import FastAPI

from chairlift.cluster.cluster_client import ClusterClient, RemoteReplica
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.usage_aggregator import SharedUsage, UsageExchange, exchange_periodically
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.process.client import EngineStatus
from chairlift.server.access.admission import AdmissionController
from chairlift.server.application import create_models_app
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel, VisibleEngine
from chairlift.server.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class OffsetClock:
    """The monotonic clock of another machine, `offset` seconds before this machine's clock."""

    client: ClusterClient
    offset: float

    def now(self) -> float:
        return self.client.now() - self.offset


class ObservedReplica(VisibleEngine):
    """A replica with an observer of its events."""

    def __init__(self, model: ServedModel, replica: RemoteReplica, client: ClusterClient) -> None:
        self._replica, self._client = replica, client
        clock = OffsetClock(client, replica.clock_offset)
        super().__init__(model.name, replica.events, clock, replica.replica_id)
        self.facts = client.engine.facts

    def status(self) -> EngineStatus:
        replica, engine = self._replica, self._replica.engine
        counts = self.observer.tracker.counts()
        unfinished = counts["running"] + counts["waiting"]
        seconds = self._client.now() - replica.last_message
        stalled = seconds if unfinished else 0.0
        return EngineStatus(engine.state, engine.restarts, seconds, unfinished, stalled, engine.last_failure)


def observe_replicas(model: ServedModel, client: ClusterClient) -> None:
    """Let a model show the replicas of its client, from now on and before their first events."""

    def add(replica: RemoteReplica) -> None:
        model.replicas[replica.replica_id] = ObservedReplica(model, replica, client)

    client.on_replica, client.on_replica_end = add, lambda replica: model.end_replica(replica.replica_id)


def replicated_model(spec: ModelSpec, client: ClusterClient) -> ServedModel:
    """The model of a client, whose replicas Ray Serve starts and supervises: the server never unloads it."""
    model = ServedModel(spec, client.events)
    observe_replicas(model, client)
    model.set_service(ModelService(AsyncLLM(client=client), spec.api))
    return model


PERIOD_SECONDS: Final = 0.1
"""A key may exceed its rate by what it uses of other ingresses in this time."""


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """What an ingress is built from: its models, and the options of the cluster and of `chairlift serve`."""

    models: tuple[ModelSpec, ...]
    options: ClusterOptions
    served: ServeOptions


def build_cluster_app(
    setup: ClusterSetup, clients: Mapping[str, ClusterClient], exchange: UsageExchange[tuple[str, str]] | None = None
) -> FastAPI:
    """Create the application over the clients of the models, by name. It closes the clients when it shuts down.

    Args:
        exchange: exchanges the use of keys with other ingresses; None if there are none.
    """
    models = [replicated_model(spec, clients[spec.name]) for spec in setup.models]
    sharing = None if exchange is None else partial(share_usage, exchange=exchange)
    return create_models_app(ModelManager(models), setup.served, share_usage=sharing)


async def share_usage(admission: AdmissionController, exchange: UsageExchange[tuple[str, str]]) -> None:
    """Charge keys for what they use of other ingresses, by tenant and unit, until the task is cancelled.

    While the exchange fails, the limits apply to this ingress alone, and a warning is logged.
    """
    await exchange_periodically(
        lambda: SharedUsage(admission.take_usage(), admission.num_concurrent()),
        lambda usage: admission.charge_remote_usage(usage.amounts, usage.num_concurrent),
        exchange,
        PERIOD_SECONDS,
        "the limits of keys count only this ingress",
    )
