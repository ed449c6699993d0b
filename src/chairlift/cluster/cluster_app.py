"""The HTTP application of an ingress: the application of a server, over the replicas of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import FastAPI

from chairlift.cluster.cluster_client import ClusterClient
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.replicated_model import observe_replicas
from chairlift.cluster.usage_aggregator import SharedUsage, UsageExchange, exchange_periodically
from chairlift.engine.async_llm import AsyncLLM
from chairlift.server.access.access_options import AccessOptions
from chairlift.server.access.admission import AdmissionController
from chairlift.server.application import create_models_app
from chairlift.server.http.server_limits import ServerLimits
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel
from chairlift.server.telemetry.observability_options import ObservabilityOptions
from chairlift.server.web.page_options import PageOptions

PERIOD_SECONDS: Final = 0.1
"""A key may exceed its rate by what it uses of other ingresses in this time."""


@dataclass(frozen=True, slots=True)
class ClusterSetup:
    """What an ingress is built from: the options of `chairlift serve`, and those of the cluster."""

    models: tuple[ModelSpec, ...]
    options: ClusterOptions
    limits: ServerLimits
    access: AccessOptions
    observability: ObservabilityOptions
    pages: PageOptions


class ReplicatedModel(ServedModel):
    """A model whose replicas Ray Serve starts and supervises: it is never unloaded by the server."""

    def __init__(self, spec: ModelSpec, client: ClusterClient) -> None:
        super().__init__(spec.name, None, client.events)
        self._aliases = spec.aliases
        observe_replicas(self, client)

    @property
    def aliases(self) -> tuple[str, ...]:
        return self._aliases


def build_cluster_app(
    setup: ClusterSetup, clients: Mapping[str, ClusterClient], exchange: UsageExchange[tuple[str, str]] | None = None
) -> FastAPI:
    """Create the application over the clients of the models, by name. It closes the clients when it shuts down.

    Args:
        exchange: exchanges the use of keys with other ingresses; None if there are none.
    """
    admission = AdmissionController(setup.limits, setup.access.keys)
    models = []
    for spec in setup.models:
        client = clients[spec.name]
        model = ReplicatedModel(spec, client)
        model.set_service(ModelService(AsyncLLM(client=client), spec.name, spec.api))
        models.append(model)
    return create_models_app(
        ModelManager(models),
        admission,
        observability=setup.observability,
        cors=setup.access.cors,
        key_reloader=setup.access.key_reloader,
        allowed_hosts=setup.access.allowed_hosts,
        pages=setup.pages,
        share_usage=None if exchange is None else partial(share_usage, exchange=exchange),
    )


async def share_usage(admission: AdmissionController, exchange: UsageExchange[tuple[str, str]]) -> None:
    """Charge keys for what they use of other ingresses, by tenant and unit, until the task is cancelled.

    While the exchange fails, the limits are those of this ingress, and a warning is logged.
    """

    def take() -> SharedUsage[tuple[str, str]]:
        return SharedUsage(admission.take_usage(), admission.num_concurrent())

    def charge(usage: SharedUsage[tuple[str, str]]) -> None:
        admission.charge_remote_usage(usage.amounts, usage.num_concurrent)

    await exchange_periodically(take, charge, exchange, PERIOD_SECONDS, "the limits of keys count only this ingress")
