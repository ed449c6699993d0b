"""RayTransport: calls to the replicas of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec
from grpc import RpcError
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from chairlift.cluster.cluster_client import ReplicaCallError, ReplicaLostError
from chairlift.cluster.cluster_view import CallRoute, cluster_view
from chairlift.cluster.replica_state import RoutedPrompt
from chairlift.config import EngineConfig
from chairlift.engine.served_engine import EngineFacts
from chairlift.errors import ChairliftError

LOST_ERRORS: Final = (RayActorError, DeploymentUnavailableError, RequestCancelledError)
"""Errors of calls whose replica is gone. Other errors affect only their call."""

CALL_ERRORS: Final = (ChairliftError, RayError, RayServeException, RpcError, RuntimeError)
"""All errors of calls. Ray Serve raises a RuntimeError if a connection ends before the replica accepts the call."""

CONTROL_SECONDS: Final = 10.0
RETRY_SECONDS: Final = 0.5


class RayTransport:
    """Calls `EngineReplica` through the handle of its deployment.

    Calls use Ray Serve's connections between deployments (gRPC), which take half the time of calls of Ray actors.

    Args:
        on_close: stops the cluster; None if it continues without this process.
    """

    def __init__(self, handle: DeploymentHandle[Any], on_close: Callable[[], None] | None = None) -> None:
        self._handle = handle.options(_by_reference=False)
        self._streaming_handle = self._handle.options(stream=True)
        self._on_close = on_close
        self.view = cluster_view(handle.app_name, handle.deployment_name)

    async def run(self, request_id: str, prompt: RoutedPrompt, message: bytes) -> None:
        async with aclosing(self._stream("run", CallRoute(request_id, prompt), message)) as messages:
            async for _ in messages:
                pass

    async def abort(self, replica_id: str, message: bytes) -> None:
        await self._call_replica(replica_id, "abort", message)

    async def record_heartbeat(self, replica_id: str, ingress_id: str, num_handled: int) -> None:
        await self._call_replica(replica_id, "record_heartbeat", ingress_id, num_handled)

    async def _call_replica(self, replica_id: str, method: str, *arguments: Any) -> None:
        """Call one replica. Ray Serve would wait for a replica that has gone to come back."""
        response = getattr(self._handle, method).remote(CallRoute(replica_id=replica_id), *arguments)
        try:
            async with asyncio.timeout(CONTROL_SECONDS):
                await response
        except CALL_ERRORS as error:
            raise call_error(error) from None
        except BaseException as error:
            response.cancel()
            if isinstance(error, TimeoutError):
                raise ReplicaLostError(f"no answer to {method} within {CONTROL_SECONDS:g} s") from None
            raise

    async def subscribe(self, replica_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._stream("subscribe", CallRoute(replica_id=replica_id), ingress_id)) as messages:
                async for message in messages:
                    yield message
        except ReplicaCallError as error:
            raise ReplicaLostError(str(error)) from None

    async def _stream(self, method: str, route: CallRoute, argument: Any) -> AsyncGenerator[bytes, None]:
        response: Any = getattr(self._streaming_handle, method).remote(route, argument)
        try:
            async for message in response:
                yield message
        except CALL_ERRORS as error:
            raise call_error(error) from None
        finally:
            with suppress(*CALL_ERRORS):  # raises the error again if the call has not reached a replica
                response.cancel()

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()


async def fetch_facts(handle: DeploymentHandle[Any], config: EngineConfig) -> EngineFacts:
    """The facts of the engine, from a replica with this configuration. During an update, replicas with the previous
    configuration may answer first."""
    while (message := await handle.facts.remote(config)) is None:
        await asyncio.sleep(RETRY_SECONDS)
    return msgspec.msgpack.decode(message, type=EngineFacts)


def read_facts(handle: DeploymentHandle[Any], config: EngineConfig) -> EngineFacts:
    """As `fetch_facts`, for a thread without an event loop."""
    while (message := handle.facts.remote(config).result()) is None:
        time.sleep(RETRY_SECONDS)
    return msgspec.msgpack.decode(message, type=EngineFacts)


def call_error(error: Exception) -> ReplicaLostError | ReplicaCallError:
    """The error of a call that Ray or the replica has ended, with its reason in one line."""
    reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, RayActorError):
        reason = "its process died or its machine cannot be reached"
    if isinstance(error, LOST_ERRORS):
        return ReplicaLostError(reason)
    return ReplicaCallError(str(error.cause) if isinstance(error, RayTaskError) else reason)
