"""RayTransport: calls to the replicas of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from chairlift.cluster.cluster_client import ReplicaCallError, ReplicaLostError
from chairlift.cluster.cluster_view import Route, cluster_view, deployment_name
from chairlift.cluster.replica_state import RoutedPrompt
from chairlift.engine.served_engine import EngineFacts

LOST_ERRORS: Final = (RayActorError, DeploymentUnavailableError, RequestCancelledError)
"""Errors of calls whose replica is gone. Other errors are those of the replica's code."""

CONTROL_SECONDS: Final = 10.0


class RayTransport:
    """Calls `EngineReplica` through the handle of its deployment.

    Args:
        on_close: stops the cluster; None if it continues without this process.
    """

    def __init__(self, handle: DeploymentHandle[Any], on_close: Callable[[], None] | None = None) -> None:
        self._handle = handle
        self._on_close = on_close
        self.view = cluster_view(deployment_name(handle.app_name, handle.deployment_name))

    async def run(self, request_id: str, prompt: RoutedPrompt, message: bytes) -> None:
        await self._call("run", Route(request_id, prompt), message)

    async def abort(self, replica_id: str, message: bytes) -> None:
        await self._call_replica(replica_id, "abort", message)

    async def record_heartbeat(self, replica_id: str, ingress_id: str) -> None:
        await self._call_replica(replica_id, "record_heartbeat", ingress_id)

    async def _call_replica(self, replica_id: str, method: str, argument: Any) -> None:
        """Call one replica. Ray Serve would wait for a replica that has gone to come back."""
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                await self._call(method, Route(replica_id=replica_id), argument)
        except TimeoutError:
            raise ReplicaLostError(f"no answer to {method} within {CONTROL_SECONDS:g} s") from None

    async def _call(self, method: str, route: Route, argument: Any) -> None:
        response = getattr(self._handle, method).remote(route, argument)
        try:
            await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except LOST_ERRORS as error:
            raise ReplicaLostError(describe_loss(error)) from None
        except RayTaskError as error:
            raise ReplicaCallError(str(error.cause)) from None
        except (RayError, RayServeException) as error:
            raise ReplicaCallError(describe_loss(error)) from None

    async def subscribe(self, replica_id: str, ingress_id: str) -> AsyncIterator[bytes]:
        streaming = self._handle.options(stream=True)
        response: Any = streaming.subscribe.remote(Route(replica_id=replica_id), ingress_id)
        try:
            async for message in response:
                yield message
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(describe_loss(error)) from None
        finally:
            response.cancel()

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()


async def fetch_facts(handle: DeploymentHandle[Any]) -> EngineFacts:
    """The facts of the engine, from any of its replicas."""
    return msgspec.msgpack.decode(await handle.facts.remote(), type=EngineFacts)


def read_facts(handle: DeploymentHandle[Any]) -> EngineFacts:
    """As `fetch_facts`, for a thread without an event loop."""
    return msgspec.msgpack.decode(handle.facts.remote().result(), type=EngineFacts)


def describe_loss(error: Exception) -> str:
    """The reason of an error of Ray in one line."""
    if isinstance(error, RayActorError):
        return "its process died or its machine cannot be reached"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
