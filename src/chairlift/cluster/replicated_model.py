"""The replicas of a served model as the API shows them: the metrics, requests and events of each."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.cluster.cluster_client import ClusterClient, RemoteReplica
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.process.client import EngineStatus
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel, VisibleEngine


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
