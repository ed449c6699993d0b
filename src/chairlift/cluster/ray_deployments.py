"""The deployments of Ray Serve: replicas of an engine, and the ingress with the HTTP API."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

import msgspec
import ray
from fastapi import FastAPI
from ray import serve
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve import Application
from ray.serve._private import replica as replica_module
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from chairlift.cluster.cluster_app import ClusterSetup, build_cluster_app
from chairlift.cluster.cluster_client import ClusterClient
from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.cluster_view import CallRoute
from chairlift.cluster.engine_replica import EngineReplica
from chairlift.cluster.ray_transport import RayTransport, fetch_facts
from chairlift.cluster.usage_aggregator import (
    SERVICE_PERIOD_SECONDS,
    SharedUsage,
    UsageAggregator,
    UsageExchange,
    exchange_periodically,
)
from chairlift.config import EngineConfig
from chairlift.engine.input_processor import NoTokenizer
from chairlift.engine.process.process_client import ProcessClient
from chairlift.engine.served_engine import EngineFacts, ServedEngine
from chairlift.errors import EngineDeadError
from chairlift.loading.resolve import resolve_model
from chairlift.policy_class import is_fair
from chairlift.server.access.access_options import is_loopback

logger = logging.getLogger("chairlift")

ROUTER_CLASS: Final = "chairlift.cluster.request_router:PrefixAwareRouter"
MAX_ONGOING_REQUESTS: Final = 1_000_000
"""Serve never rejects a call, because engines have their own queues, and the ingress limits their length."""

NAMESPACE: Final = "chairlift-usage-2"
"""The namespace of usage aggregators in Ray. Its number changes with their interface, because an aggregator outlives an
update of Chairlift."""

EXCHANGE_SECONDS: Final = 5.0
"""Time limit of a call of a usage aggregator."""

LOGGING: Final = {"enable_access_log": False, "log_level": "WARNING"}
"""The log of Ray Serve itself."""

LOG_LEVEL: Final = logging.INFO
"""The level of Chairlift's log on a cluster."""

UNHEALTHY_STATES: Final = ("cannot_restart", "dead")


def configure_logging(log_level: int) -> None:
    """Write the log of Chairlift to the standard error of this process, which Ray keeps in a file of its log folder.

    `sys.stderr` is not used, because Ray Serve replaces it by its own log with the settings of deploy/ray/cluster.env.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.__stderr__)
    logger.setLevel(log_level)


def listen_on_loopback() -> None:
    """If this Ray is only on the loopback, let Ray Serve open the port of this replica there, too.

    Ray Serve opens it for the calls of other deployments when the replica has been initialized, on all addresses.
    """
    ip: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    if is_loopback(ip):
        add_port: Any = add_port_to_grpc_server
        setattr(replica_module, add_port.__name__, lambda server, _address: add_port(server, f"{ip}:0"))


class EngineDeployment:
    """A replica: an engine process, and the calls of `EngineReplica`, each with the `CallRoute` that led to it.

    Raises:
        ModelLoadError, ConfigError: see `ProcessClient.wait_until_ready`.
    """

    async def __init__(self, config: EngineConfig, watchdog_timeout: float, log_level: int) -> None:  # type: ignore[misc]
        configure_logging(log_level)
        listen_on_loopback()
        self._config = config
        config = replace(config, enable_kv_cache_events=config.has_prefix_cache)
        client = ProcessClient(config, watchdog_timeout=watchdog_timeout)
        replica = self._replica = EngineReplica(await asyncio.to_thread(client.wait_until_ready))
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        if is_fair(config.scheduling_policy):
            context = serve.get_replica_context()
            exchange: UsageExchange[str] = aggregator_exchange(context.app_name, context.deployment)
            sharing = exchange_periodically(
                lambda: SharedUsage(replica.service.take()),
                lambda usage: replica.charge(usage.amounts),
                exchange,
                SERVICE_PERIOD_SECONDS,
                "fair sharing counts only this replica",
            )
            self._sharing = asyncio.create_task(sharing)

    async def facts(self, config: EngineConfig) -> bytes | None:
        """The `EngineFacts` of the engine; None if its configuration is another one."""
        return msgspec.msgpack.encode(self._replica.client.engine.facts) if config == self._config else None

    def _check(self, route: CallRoute) -> None:
        """Raise EngineDeadError if a call is for a replica that has gone."""
        if route.replica_id not in (None, self._replica_id):
            raise EngineDeadError(f"replica {route.replica_id} has stopped")

    async def run(self, route: CallRoute, message: bytes) -> AsyncIterator[bytes]:
        """Run a request, and yield an empty message at its end.

        The call is a stream, because Ray Serve may repeat other calls when a replica has died. It has a message,
        because gRPC may lose the metadata of a stream without messages, and Ray Serve then reports an error.
        """
        self._check(route)
        assert route.prompt is not None
        await self._replica.run(route.prompt, message)
        yield b""

    async def abort(self, route: CallRoute, message: bytes) -> None:
        self._check(route)
        await self._replica.abort(message)

    async def record_heartbeat(self, route: CallRoute, ingress_id: str, num_handled: int) -> None:
        self._check(route)
        await self._replica.record_heartbeat(ingress_id, num_handled)

    async def subscribe(self, route: CallRoute, ingress_id: str) -> AsyncIterator[bytes]:
        self._check(route)
        messages = self._replica.subscribe(ingress_id)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()  # type: ignore[attr-defined]

    async def check_health(self) -> None:
        """Let Ray Serve replace this replica if its engine cannot be restarted."""
        self._replica.open()
        client = self._replica.client
        if client.state in UNHEALTHY_STATES:
            raise EngineDeadError(f"the engine is {client.state}: {client.last_failure}")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._replica.client.close)


def engine_deployment(
    config: EngineConfig, options: ClusterOptions, name: str = "engine", log_level: int | None = None
) -> Any:
    """The bound deployment of an engine's replicas.

    Args:
        log_level: the level of Chairlift's log in the replicas; None is the level of this process.
    """
    deployment: Any = serve.deployment(
        EngineDeployment,
        name=name,
        ray_actor_options=options.actor_options(config),
        request_router_config=RequestRouterConfig.model_validate({"request_router_class": ROUTER_CLASS}),
        num_replicas=options.replicas,
        **_supervision(options),
    )
    level = logger.getEffectiveLevel() if log_level is None else log_level
    return deployment.bind(config, options.watchdog_timeout, level)


def _supervision(options: ClusterOptions) -> dict[str, Any]:
    """The options that all deployments have."""
    return {
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "graceful_shutdown_timeout_s": options.drain_timeout,
        "health_check_period_s": options.health_check_period,
        "health_check_timeout_s": options.health_check_timeout,
        "logging_config": LOGGING,
    }


@serve.ingress(None)
class IngressDeployment:
    """The HTTP API over the replicas of each model.

    Args:
        setup: how the API is built.
        handles: the deployment of each model, in the order of `setup.models`.
    """

    async def __init__(self, setup: ClusterSetup, log_level: int, *handles: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        configure_logging(log_level)
        listen_on_loopback()
        self._setup = setup
        self._clients = {
            spec.name: make_client(RayTransport(handle), await fetch_facts(handle, spec.config), spec.config)
            for spec, handle in zip(setup.models, handles, strict=True)
        }

    def __serve_build_asgi_app__(self) -> FastAPI:
        exchange: UsageExchange[tuple[str, str]] | None = None
        if self._setup.served.access.keys.by_tenant:  # also with one ingress, because an update starts another one
            exchange = aggregator_exchange(serve.get_replica_context().app_name, "keys")
        return build_cluster_app(self._setup, self._clients, exchange)

    async def check_health(self) -> None:
        """Let Ray Serve replace this ingress if it cannot serve any model."""
        if all(client.state == "dead" for client in self._clients.values()):
            raise EngineDeadError("the clients of all models are closed")


def aggregator_exchange(app_name: str, purpose: str) -> UsageExchange[Any]:
    """The `exchange` of a `UsageAggregator` in an actor, which the first process of an application starts."""
    actor_class: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(UsageAggregator)
    name = f"{app_name}/{purpose}"
    actor = actor_class.options(name=name, namespace=NAMESPACE, lifetime="detached", get_if_exists=True).remote()

    async def exchange(sender_id: str, usage: SharedUsage[Any]) -> SharedUsage[Any]:
        answer = actor.exchange.remote(sender_id, usage)
        async with asyncio.timeout(EXCHANGE_SECONDS):
            answered: SharedUsage[Any] = await answer
        return answered

    return exchange


def bind_application(setup: ClusterSetup) -> Application:
    """The application of Ray Serve: an ingress, and a deployment for each model.

    The only model has a deployment whose name does not depend on it, because Ray Serve would otherwise delete the old
    replicas before the new ones run. The log level is not taken from this process, which is a worker of Ray with `serve
    deploy`.
    """
    options, models = setup.options, setup.models
    names = ["engine"] if len(models) == 1 else [deployment_name_of(spec.name) for spec in models]
    engines = [
        engine_deployment(spec.config, options, name, LOG_LEVEL) for spec, name in zip(models, names, strict=True)
    ]
    ingress: Any = serve.deployment(
        IngressDeployment,
        name="ingress",
        num_replicas=options.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_surge_percent=100,  # an update starts new ingresses before it stops the old ones
        **_supervision(options),
    )
    application: Application = ingress.bind(setup, LOG_LEVEL, *engines)
    return application


def deployment_name_of(model: str) -> str:
    """The name of the deployment of one of several models. Ray does not allow all characters of names of models, and
    models whose names differ only in such characters have different deployments."""
    allowed = re.sub(r"[^A-Za-z0-9_-]", "-", model)
    digest = hashlib.sha256(model.encode()).hexdigest()[:6]
    return f"engine-{allowed}" if allowed == model else f"engine-{allowed}-{digest}"


def make_client(transport: RayTransport, facts: EngineFacts, config: EngineConfig) -> ClusterClient:
    """The client of a deployment, with the tokenizer of this process.

    Raises:
        ModelLoadError: the tokenizer cannot be loaded.
    """
    source = resolve_model(config.model, accept_terms=config.accept_terms)
    tokenizer = NoTokenizer() if config.skip_tokenizer_init else source.tokenizer()
    engine = ServedEngine(facts, tokenizer, config.seed, id_prefix=f"{secrets.token_hex(4)}-")
    return ClusterClient(transport, engine)
