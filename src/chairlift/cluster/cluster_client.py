"""ClusterClient: several replicas of an engine behind the interface of one engine.

    send(Add) --> router chooses a replica --> the call runs until the request has ended
    <-- outputs and events <-- one stream of messages from each replica

A request is lost with its replica if it has output; otherwise it is sent to another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from chairlift.cluster.cluster_view import ClusterView
from chairlift.cluster.replica_messages import (
    ClockReading,
    ReplicaEngine,
    ReplicaHello,
    ReplicaMessage,
    RunRequest,
    model_digest,
    shift_output,
)
from chairlift.cluster.replica_state import RoutedPrompt
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineClient
from chairlift.engine.process.commands import Abort, Add, Command, Stop
from chairlift.engine.process.in_flight import InFlightGroup
from chairlift.engine.process.wire import unpack_events
from chairlift.engine.served_engine import ServedEngine
from chairlift.engine.sibling_groups import SiblingGroups, unfinished_ids
from chairlift.errors import EngineDeadError, Failure
from chairlift.outputs import EngineCoreOutput

logger = logging.getLogger("chairlift")

RETRY_SECONDS: Final = 1.0
DRAIN_SECONDS: Final = 5.0
"""Time for the last messages of a replica whose calls have failed."""

HEARTBEAT_SECONDS: Final = 5.0
REPLACED_SECONDS: Final = 60.0
"""Time that requests wait for a replica of their model while only replicas of another one are running."""

LOST_REPLICA: Final = "the replica of the request was lost"

MAX_SILENCE_SECONDS: Final = 30.0
"""A replica that Ray Serve has removed is lost when it has sent nothing for this time. One that drains sends a message
after each step; one that hangs has failed its health checks."""


class ReplicaLostError(Exception):
    """A call has failed because its replica died or cannot be reached."""


class ReplicaCallError(Exception):
    """A call has failed on its replica, which continues."""


class ReplicaTransport(Protocol):
    """The calls to replicas, see `EngineReplica`. They raise ReplicaLostError if the replica is gone, and
    ReplicaCallError if it rejects the call."""

    view: ClusterView

    async def run(self, request_id: str, prompt: RoutedPrompt, message: bytes) -> None:
        """Choose a replica by `view.route`, and run a request on it until it has ended. It is not called while
        `view.has_choice()` is false."""

    async def abort(self, replica_id: str, message: bytes) -> None: ...

    async def record_heartbeat(self, replica_id: str, ingress_id: str, num_handled: int) -> None: ...

    def subscribe(self, replica_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]: ...

    def close(self) -> None:
        """Release what the calls need; called once, after the last of them."""


@dataclass(slots=True, eq=False)
class RemoteReplica:
    """A replica that this ingress receives messages from.

    Attributes:
        events: the events of its engine, whose times are `clock_offset` seconds before the times of this machine.
        engine: the state of its engine, as published.
        num_handled: the number of its messages that were handled.
    """

    replica_id: str
    events: EventHub = field(default_factory=EventHub)
    clock_offset: float = 0.0
    engine: ReplicaEngine = field(default_factory=lambda: ReplicaEngine("running", 0, None))
    last_message: float = 0.0
    num_handled: int = 0
    reader: asyncio.Task[None] = field(init=False)
    heartbeat: asyncio.Task[None] | None = None
    loss: str = "the connection to the replica was lost"


@dataclass(slots=True, eq=False)
class RoutedGroup(InFlightGroup):
    """Siblings that run on one replica."""

    add: Add
    prompt: RoutedPrompt
    task: asyncio.Task[None] | None = None

    @property
    def request_id(self) -> str:
        return self.add.first.request_id


class ClusterClient(EngineClient):
    """Sends requests to replicas, and receives their outputs and events.

    Args:
        engine: the facts of the replicas, which are equal, with the tokenizer of this process.

    Attributes:
        replicas: the replicas by id.
        on_replica: called with each replica when its first message has arrived, before its events.
        on_replica_end: called with each replica when its messages have ended.
    """

    fixed_adapters = "the adapters of a cluster do not change while it runs: name them with --lora-modules"

    def __init__(self, transport: ReplicaTransport, engine: ServedEngine) -> None:
        super().__init__()
        self.engine = engine
        self.ingress_id = uuid.uuid4().hex
        self.replicas: dict[str, RemoteReplica] = {}
        self.on_replica: Callable[[RemoteReplica], None] = lambda replica: None
        self.on_replica_end: Callable[[RemoteReplica], None] = lambda replica: None
        self._transport = transport
        self._view = transport.view
        self._groups = SiblingGroups[RoutedGroup]()
        self._model_digest = model_digest(engine.facts)
        self._other_models: set[str] = set()  # running replicas with another model
        self._replicas_changed = asyncio.Event()
        self._is_closed = self._is_transport_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._hello_decoder = msgspec.msgpack.Decoder(ReplicaHello)
        self._decoder = msgspec.msgpack.Decoder(ReplicaMessage)

    def _start(self) -> None:
        self._view.on_replicas(lambda ids: self._call_on_loop(self._update_replicas, ids))
        self._start_task(self._send_heartbeats())

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            self._abort(command)
        else:
            assert isinstance(command, Stop)

    def stop(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.state = "dead"
        if self._is_open and not self._loop.is_closed():
            for task in list(self._tasks):
                task.cancel()

    def close(self, seconds: float | None = None) -> None:
        self.stop()
        if not self._is_transport_closed:
            self._is_transport_closed = True
            self._transport.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _add(self, add: Add) -> None:
        first = add.first
        block_size = self.engine.facts.kv_cache_plan.block_size
        prompt = RoutedPrompt.from_tokens(first.prompt_token_ids, block_size, first.cache_salt, first.lora_id)
        group = RoutedGroup({request.request_id: request for request in add.requests()}, add, prompt)
        self._groups.add(group)
        self._run(group)

    def _run(self, group: RoutedGroup) -> None:
        group.num_runs += 1
        self._view.add(group.request_id)
        group.task = self._start_task(self._serve(group))

    async def _serve(self, group: RoutedGroup) -> None:
        """Run a request on a replica. Its outputs arrive with the messages of the replica."""
        if not await self._wait_for_replica():
            error = "the deployment was updated to another model: send the request again"
            return self._fail_groups([group], EngineDeadError(error))
        message = self._encoder.encode(RunRequest(self.ingress_id, ClockReading.now(), group.add))
        try:
            await self._transport.run(group.request_id, group.prompt, message)
            if group.unfinished:
                await asyncio.sleep(DRAIN_SECONDS)
                self._handle_loss([group], "the call of the request has ended", "its last output is missing")
        except ReplicaLostError as error:
            replica_id = self._view.replica_of(group.request_id)
            if replica_id is not None and (replica := self.replicas.get(replica_id)) is not None:
                replica.loss = str(error)
                self._set_answering(replica, False)
                self._start_task(self._end_later(replica))  # which decides about all requests of the replica
            else:
                self._handle_loss([group], LOST_REPLICA, str(error))
        except ReplicaCallError as error:
            self._handle_loss([group], "the replica of the request has rejected it", str(error))
        except Exception as error:
            failure = Failure(str(error))
            logger.exception("a request could not be sent to a replica: %s", failure)
            texts = (f"the request could not be sent to a replica: {text}" for text in failure.texts)
            self._fail_groups([group], EngineDeadError(*texts))

    async def _wait_for_replica(self) -> bool:
        """Wait until a replica can be chosen; returns False if there are only replicas of another model, for long
        enough that none of this model is being started."""
        while not self._view.has_choice():
            self._replicas_changed.clear()
            try:
                async with asyncio.timeout(REPLACED_SECONDS if self._is_replaced() else None):
                    await self._replicas_changed.wait()
            except TimeoutError:
                return False
        return True

    async def _end_later(self, replica: RemoteReplica) -> None:
        """End the messages of a replica that is lost, unless they end by themselves soon."""
        await asyncio.sleep(DRAIN_SECONDS)
        replica.reader.cancel()

    def _abort(self, command: Abort) -> None:
        aborted: dict[str | None, list[str]] = {}
        for request_id in command.request_ids:
            if (group := self._groups.get(request_id)) is not None:
                aborted.setdefault(self._view.replica_of(group.request_id), []).append(request_id)
        ended = [group.task for group in self._finish(command.request_ids) if group.task is not None]
        self._start_task(self._send_aborts(aborted, command, ended))

    async def _send_aborts(
        self, aborted: dict[str | None, list[str]], command: Abort, ended: list[asyncio.Task[None]]
    ) -> None:
        """Abort requests on their replicas, and then cancel their calls: a call that overtakes its abort would run."""
        for replica_id, ids in aborted.items():
            # A replica that drains cannot be called any more. Its calls can be cancelled.
            if replica_id is not None and self._view.is_running(replica_id):
                with contextlib.suppress(ReplicaLostError, ReplicaCallError):
                    await self._transport.abort(replica_id, self._encoder.encode(Abort(ids, command.reason)))
        for task in ended:
            task.cancel()

    def _finish(self, request_ids: list[str]) -> list[RoutedGroup]:
        """Remove requests that have ended, and return the groups that have ended with them."""
        ended = self._groups.remove(request_ids)
        for group in ended:
            replica_id = self._view.replica_of(group.request_id)
            self._view.remove(group.request_id)
            if replica_id is not None and not self._view.is_running(replica_id):
                self._loop.call_soon(self._end_if_drained, replica_id)
        return ended

    def _handle_loss(self, groups: list[RoutedGroup], cause: str, reason: str) -> None:
        """Send unfinished requests whose run has ended to another replica, if they have no output yet; the others end
        with an error.

        Args:
            cause, reason: what has happened to each of the requests, and why, for the error and the log.
        """
        failure = Failure(reason)
        groups = [group for group in groups if group.unfinished]
        lost = [group for group in groups if group.is_lost]
        if lost:
            texts = (f"{cause} ({text}): send the request again" for text in failure.texts)
            self._fail_groups(lost, EngineDeadError(*texts))
        resent = [group for group in groups if group.unfinished]
        for group in resent:
            self._view.remove(group.request_id)
            if group.task is not None:
                group.task.cancel()
            self._run(group)
        if groups:
            logger.error("%s (%s): %d requests ended, %d are sent again", cause, failure, len(lost), len(resent))

    def _fail_groups(self, groups: list[RoutedGroup], error: EngineDeadError) -> None:
        ids = unfinished_ids(groups)
        self._finish(ids)
        if ids and not self._is_closed:
            self._on_failure(ids, error)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _update_replicas(self, running: set[str]) -> None:
        """Subscribe to new replicas, and release those that have drained."""
        if self._is_closed:
            return
        for replica_id in running:
            self._subscribe(replica_id)
        for replica_id in self.replicas.keys() - running:
            self._end_if_drained(replica_id)
        self._other_models &= running
        self._replicas_changed.set()

    def _is_replaced(self) -> bool:
        """Whether replicas are running, and all of them have another model than this ingress."""
        running = self._view.running()
        return bool(running) and running <= self._other_models

    def _end_if_drained(self, replica_id: str) -> None:
        """End the messages of a replica that drains and has no requests of this ingress, so that it can stop."""
        replica = self.replicas.get(replica_id)
        if replica is not None and not self._view.is_running(replica_id) and not self._groups_of(replica_id):
            replica.reader.cancel()

    def _groups_of(self, replica_id: str) -> list[RoutedGroup]:
        return [group for group in self._groups if self._view.replica_of(group.request_id) == replica_id]

    async def _read(self, replica: RemoteReplica) -> None:
        """Handle the messages of a replica until they end, and then the loss of its requests."""
        try:
            async with aclosing(self._transport.subscribe(replica.replica_id, self.ingress_id)) as messages:
                hello = self._hello_decoder.decode(await anext(messages))
                if hello.model_digest != self._model_digest:
                    return self._exclude(replica.replica_id)
                self._handle_hello(replica, hello)
                async for message in messages:
                    self._handle(replica, message)
        except ReplicaLostError as error:
            replica.loss = str(error)
        except Exception:
            logger.exception("the messages of replica %s could not be read", replica.replica_id)
        finally:
            self._end(replica)

    def _exclude(self, replica_id: str) -> None:
        """Send no requests to a replica with another model."""
        logger.warning("replica %s has another model and receives no requests of this process", replica_id)
        self._other_models.add(replica_id)
        self._replicas_changed.set()

    def _handle_hello(self, replica: RemoteReplica, hello: ReplicaHello) -> None:
        replica.clock_offset = hello.clock.offset()
        replica.last_message = self.now()
        replica.engine = hello.engine
        replica.events.open(self._loop)
        self.on_replica(replica)
        replica.events.publish(unpack_events(hello.events))
        self._view.subscribe(replica.replica_id, hello)
        self._replicas_changed.set()
        if not self._is_closed:
            self.state = "running"

    def _handle(self, replica: RemoteReplica, message: bytes) -> None:
        """Handle one message. An error of it affects no other message."""
        self._last_step = replica.last_message = self.now()
        replica.num_handled += 1
        try:
            self._dispatch(replica, self._decoder.decode(message))
        except Exception:
            logger.exception("a message of replica %s could not be handled", replica.replica_id)

    def _dispatch(self, replica: RemoteReplica, message: ReplicaMessage) -> None:
        replica.engine = message.engine
        self._view.update(replica.replica_id, message)
        if message.events:
            replica.events.publish(unpack_events(message.events))
        replica.events.num_dropped += message.num_dropped_events
        if outputs := self._known_outputs(replica, message.outputs):
            self._on_outputs(outputs)
            self._finish([output.request_id for output in outputs if output.finish_reason is not None])
        for ids, reason in message.lost:
            groups = dict.fromkeys(group for each in ids if (group := self._group_on(replica, each)) is not None)
            self._handle_loss(list(groups), "the engine of the request was lost", reason)

    def _group_on(self, replica: RemoteReplica, request_id: str) -> RoutedGroup | None:
        """The group of an unfinished request, if it runs on this replica. Another one may have run it before."""
        group = self._groups.get(request_id)
        is_here = group is not None and self._view.replica_of(group.request_id) == replica.replica_id
        return group if is_here else None

    def _known_outputs(self, replica: RemoteReplica, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """The outputs of unfinished requests of this replica, with times of this machine."""
        known = []
        for output in outputs:
            if (group := self._group_on(replica, output.request_id)) is None:
                continue
            if not group.has_started:
                group.has_started = True
                self._view.record_output(group.request_id)
            known.append(shift_output(output, replica.clock_offset) if replica.clock_offset else output)
        return known

    def _end(self, replica: RemoteReplica) -> None:
        """Remove a replica whose messages have ended."""
        replica.engine = ReplicaEngine("dead", replica.engine.restarts, replica.loss)
        lost = self._groups_of(replica.replica_id)
        self._view.unsubscribe(replica.replica_id)
        self.replicas.pop(replica.replica_id, None)
        self.on_replica_end(replica)
        if self._is_closed or self._loop.is_closed():
            return
        if lost:
            self.restarts += 1
            self.last_failure = Failure(replica.loss)
        if not self._view.has_choice():
            self.state = "restarting"
        self._handle_loss(lost, LOST_REPLICA, replica.loss)
        self._loop.call_later(RETRY_SECONDS, self._subscribe, replica.replica_id)

    def _subscribe(self, replica_id: str) -> None:
        """Receive the messages of a running replica, unless they are received already."""
        is_known = replica_id in self.replicas or replica_id in self._other_models
        if not self._is_closed and self._view.is_running(replica_id) and not is_known:
            replica = self.replicas[replica_id] = RemoteReplica(replica_id)
            replica.reader = self._start_task(self._read(replica))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for replica in list(self.replicas.values()):
                if self._view.is_running(replica.replica_id):
                    if replica.heartbeat is None or replica.heartbeat.done():
                        replica.heartbeat = self._start_task(self._send_heartbeat(replica))
                    else:
                        self._set_answering(replica, False)
                elif self.now() - replica.last_message > MAX_SILENCE_SECONDS:
                    replica.loss = f"it has sent nothing for {MAX_SILENCE_SECONDS:g} s"
                    replica.reader.cancel()

    async def _send_heartbeat(self, replica: RemoteReplica) -> None:
        try:
            await self._transport.record_heartbeat(replica.replica_id, self.ingress_id, replica.num_handled)
        except ReplicaLostError:
            self._set_answering(replica, False)
            raise
        self._set_answering(replica, True)

    def _set_answering(self, replica: RemoteReplica, is_answering: bool) -> None:
        """Let requests go to other replicas while one does not answer."""
        if self._view.set_answering(replica.replica_id, is_answering):
            change = (
                "answers again" if is_answering else "does not answer and receives requests only if no other one does"
            )
            logger.warning("replica %s %s", replica.replica_id, change)

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # Ray Serve gives calls in the context of one HTTP request the same id, and then confuses their replicas.
        task = self._loop.create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() or self._is_closed else task.exception()
        # The end of its messages reports a lost replica.
        if error is not None and not isinstance(error, ReplicaLostError | ReplicaCallError):
            logger.error("a call to a replica failed: %r", error)
