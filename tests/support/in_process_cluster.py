"""Clusters whose replicas run in this process: the client and the replicas without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from chairlift import AsyncLLM
from chairlift.cluster.cluster_client import ClusterClient, ReplicaCallError, ReplicaLostError
from chairlift.cluster.cluster_view import ClusterView
from chairlift.cluster.engine_replica import EngineReplica
from chairlift.cluster.replica_state import RoutedPrompt
from chairlift.engine.process.client import EngineClient
from chairlift.errors import ChairliftError


class InProcessTransport:
    """Calls to replicas in this process, which can be killed and drained.

    Attributes:
        num_runs: the number of calls of `run` by replica.
        delay: seconds of each message on its way to the ingress.
    """

    def __init__(self, clients: Mapping[str, EngineClient], replicas: dict[str, EngineReplica] | None = None) -> None:
        self.view = ClusterView(seed=0)
        self.replicas = replicas or {name: EngineReplica(client) for name, client in clients.items()}
        self.num_runs = dict.fromkeys(clients, 0)
        self.delay = 0.0
        self.is_closed = False
        self._dead: dict[str, asyncio.Event] = {}
        self._clients = clients
        self.view.set_running(clients)

    async def run(self, request_id: str, prompt: RoutedPrompt, message: bytes) -> None:
        while (name := self.view.route(request_id, prompt)) is None:
            await asyncio.sleep(0.002)
        self.num_runs[name] += 1
        await self._alive(name, self.replicas[name].run(prompt, message))

    async def abort(self, replica_id: str, message: bytes) -> None:
        await self._alive(replica_id, self.replicas[replica_id].abort(message))

    async def record_heartbeat(self, replica_id: str, ingress_id: str, num_handled: int) -> None:
        await self._alive(replica_id, self.replicas[replica_id].record_heartbeat(ingress_id, num_handled))

    async def subscribe(self, replica_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        messages = self.replicas[replica_id].subscribe(ingress_id)
        try:
            while True:
                try:
                    message = await self._alive(replica_id, messages.__anext__())
                except StopAsyncIteration:
                    return
                await asyncio.sleep(self.delay)
                yield message
        finally:
            await messages.aclose()  # type: ignore[attr-defined]

    async def _alive(self, name: str, call):  # type: ignore[no-untyped-def]
        """The result of a call, unless the replica is killed before."""
        death = self._dead.setdefault(name, asyncio.Event())
        if death.is_set():
            call.close()
            raise ReplicaLostError("it was killed")
        work, killed = asyncio.ensure_future(call), asyncio.ensure_future(death.wait())
        try:
            await asyncio.wait((work, killed), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ReplicaLostError("it was killed")
            return work.result()
        except ChairliftError as error:
            raise ReplicaCallError(str(error)) from None
        finally:
            work.cancel()
            killed.cancel()
            await asyncio.wait((work, killed))

    def another(self) -> InProcessTransport:
        """The calls of another ingress to the same replicas."""
        return InProcessTransport(self._clients, self.replicas)

    def kill(self, name: str) -> None:
        """Let all calls of a replica fail, now and later."""
        self._dead.setdefault(name, asyncio.Event()).set()
        self.view.set_running(set(self.replicas) - {each for each, death in self._dead.items() if death.is_set()})

    def drain(self, name: str) -> None:
        """Route no more requests to a replica."""
        self.view.set_running(set(self.replicas) - {name})

    def close(self) -> None:
        assert not self.is_closed, "the transport is closed once"
        self.is_closed = True
        for client in self._clients.values():
            client.close()


def make_cluster(*engines: AsyncLLM) -> tuple[AsyncLLM, InProcessTransport]:
    """One AsyncLLM over engines that run in threads and have not been opened."""
    clients = {f"replica-{index}": engine._client for index, engine in enumerate(engines)}
    transport = InProcessTransport(clients)
    return AsyncLLM(client=ClusterClient(transport, engines[0].engine)), transport
