"""The HTTP application of an ingress: the application of a server, over the replicas of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from fastapi import FastAPI

from chairlift.cluster.cluster_client import ClusterClient
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.replicated_model import replicated_model
from chairlift.cluster.usage_aggregator import SharedUsage, UsageExchange, exchange_periodically
from chairlift.server.access.admission import AdmissionController
from chairlift.server.application import create_models_app
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.serve_options import ServeOptions

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
