"""EngineReplica: an engine that serves several ingresses, with one stream of messages to each of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from chairlift.cluster.replica_messages import (
    ClockReading,
    ReplicaEngine,
    ReplicaHello,
    ReplicaMessage,
    RunRequest,
    model_digest,
)
from chairlift.cluster.replica_state import ReplicaLoad, RoutedPrompt
from chairlift.cluster.usage_aggregator import ServiceMeter
from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.client import EngineClient
from chairlift.engine.process.commands import Abort, Add, ChargeTenants
from chairlift.engine.process.wire import pack_events
from chairlift.engine.sibling_groups import SiblingGroup, SiblingGroups, unfinished_ids
from chairlift.errors import ChairliftError, EngineDeadError
from chairlift.events import DroppableEvent, EngineStarted, Event, PrefixCacheChanged
from chairlift.observability.tracker import RequestTracker
from chairlift.outputs import EngineCoreOutput

MAX_PENDING_EVENTS: Final = 16_384
"""Number of events that wait for a slow ingress. Beyond it, droppable events are dropped."""

MAX_UNHANDLED_MESSAGES: Final = 16_384
"""The same for messages on their way to an ingress, which its heartbeats acknowledge."""

SILENCE_SECONDS: Final = 20.0
"""An ingress without requests is considered dead when it has not sent a heartbeat for this time."""

BUSY_SILENCE_SECONDS: Final = 600.0
"""The same for an ingress with unfinished requests, which cannot send heartbeats to a replica that drains."""


@dataclass(slots=True, eq=False)
class ReplicaGroup(SiblingGroup[EngineRequest]):
    """Siblings that an ingress has sent; `started` are those with output.

    Attributes:
        num_uncached_tokens: the prompt tokens that were not in the prefix cache when the request arrived.
    """

    add: Add
    feed: IngressFeed
    num_uncached_tokens: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    started: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class IngressFeed:
    """The messages to an ingress.

    Attributes:
        pending: what has not been sent yet.
        num_sent: number of messages so far.
        num_unhandled: number of messages that the ingress had not handled at its last heartbeat.
    """

    ingress_id: str
    pending: ReplicaMessage = field(default_factory=ReplicaMessage)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False
    last_heartbeat: float = 0.0
    num_sent: int = 0
    num_unhandled: int = 0

    @property
    def is_slow(self) -> bool:
        return len(self.pending.events) >= MAX_PENDING_EVENTS or self.num_unhandled >= MAX_UNHANDLED_MESSAGES

    def add_event(self, event: Event, encoded: msgspec.Raw) -> None:
        if self.is_slow and isinstance(event, DroppableEvent):
            self.pending.num_dropped_events += 1
        else:
            self.pending.events.append((event.type, encoded))


class EngineReplica:
    """Runs requests of ingresses in one engine. It must be used on one event loop.

    The engine must emit the changes of its prefix cache (`enable_kv_cache_events`).

    Args:
        client: the engine, which is ready.

    Attributes:
        service: the service that its engine gives to tenants.
        tracker: the state of its engine by its events.
    """

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.service = ServiceMeter()
        self._feeds: dict[str, IngressFeed] = {}
        self._groups = SiblingGroups[ReplicaGroup]()
        self._cached: set[int] = set()
        plan = client.engine.facts.kv_cache_plan
        self._block_size, self._num_blocks = plan.block_size, plan.num_blocks
        self._is_open = False
        self._death: str | None = None
        self._decoder = msgspec.msgpack.Decoder(RunRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self.tracker = RequestTracker()
        for listener in (self.tracker, self):
            client.events.add(listener)

    def open(self) -> None:
        """Connect the engine to the running event loop. Further calls have no effect."""
        if not self._is_open:
            self._is_open = True
            self.client.open(self._deliver, self._fail)

    # -- calls of an ingress ---------------------------------------------------------------------------------------

    async def run(self, prompt: RoutedPrompt, message: bytes) -> None:
        """Run a `RunRequest` until its last request has ended. Cancelling this call aborts the requests.

        Args:
            prompt: the prompt of the request, as it was routed.

        Raises:
            EngineDeadError: the engine does not run and cannot be restarted, or the ingress has no subscription.
        """
        self.open()
        run = self._decoder.decode(message)
        if self._death is not None:
            raise EngineDeadError(self._death)
        if (error := self.client.unavailable) is not None:
            raise EngineDeadError(str(error))
        if (feed := self._feeds.get(run.ingress_id)) is None:
            raise EngineDeadError("the ingress has no subscription to this replica")
        add = run.local_add()
        num_uncached = add.num_prompt_tokens - prompt.num_cached_tokens(self._block_size, self._cached)
        group = ReplicaGroup({request.request_id: request for request in add.requests()}, add, feed, num_uncached)
        self._groups.add(group)
        self.client.send(add)
        try:
            await group.ended.wait()
        finally:
            # Requests that the ingress has sent again in the meantime have moved to another group.
            self._abort([group])

    async def abort(self, message: bytes) -> None:
        """Abort the requests of an `Abort`. Unknown ids have no effect."""
        abort = msgspec.msgpack.decode(message, type=Abort)
        self.client.send(abort)
        self._forget(abort.request_ids)

    async def record_heartbeat(self, ingress_id: str, num_handled: int) -> None:
        """Record a heartbeat of an ingress, which has handled this number of messages of its subscription."""
        if (feed := self._feeds.get(ingress_id)) is not None:
            feed.last_heartbeat, feed.num_unhandled = self.client.now(), feed.num_sent - num_handled

    async def subscribe(self, ingress_id: str) -> AsyncIterator[bytes]:
        """Yield a `ReplicaHello`, and then a `ReplicaMessage` after each step. The requests of the ingress end with
        the iteration. A second subscription of an ingress replaces the first one."""
        self.open()
        self._unsubscribe(self._feeds.get(ingress_id))
        feed = self._feeds[ingress_id] = IngressFeed(ingress_id, last_heartbeat=self.client.now())
        try:
            yield self._encoder.encode(self._hello(feed))
            while not feed.is_closed:
                if await self._wait(feed):
                    yield self._encoder.encode(self._message(feed))
        finally:
            self._unsubscribe(feed)

    async def _wait(self, feed: IngressFeed) -> bool:
        """Wait until the feed has something to send, and close it if its ingress sends no heartbeats; returns whether
        it is open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE_SECONDS):
                await feed.changed.wait()
        feed.changed.clear()
        is_busy = any(group.feed is feed for group in self._groups)
        limit = BUSY_SILENCE_SECONDS if is_busy else SILENCE_SECONDS
        if self.client.now() - feed.last_heartbeat > limit:
            feed.is_closed = True
        return not feed.is_closed

    def _unsubscribe(self, feed: IngressFeed | None) -> None:
        """End a feed, and abort the requests of its ingress."""
        if feed is None or self._feeds.get(feed.ingress_id) is not feed:
            return
        del self._feeds[feed.ingress_id]
        feed.is_closed = True
        feed.changed.set()
        self._abort(group for group in self._groups if group.feed is feed)

    def _abort(self, groups: Iterable[ReplicaGroup]) -> None:
        if unfinished := unfinished_ids(groups):
            self.client.send(Abort(unfinished))
            self._forget(unfinished)

    def _forget(self, request_ids: list[str]) -> None:
        """Remove requests that have ended."""
        for group in self._groups.remove(request_ids):
            group.ended.set()

    # -- messages ----------------------------------------------------------------------------------------------------

    def _hello(self, feed: IngressFeed) -> ReplicaHello:
        started, unfinished = self.tracker.started, self.tracker.unfinished.values()
        events = [*(() if started is None else (started,)), *(each.arrived for each in unfinished)]
        return ReplicaHello(
            ClockReading.now(),
            model_digest(self.client.engine.facts),
            self._engine(),
            self._block_size,
            self._num_blocks,
            sorted(self._cached),
            self.load(without=feed),
            pack_events(events),
        )

    def _message(self, feed: IngressFeed) -> ReplicaMessage:
        message, feed.pending = feed.pending, ReplicaMessage()
        message.others, message.engine = self.load(without=feed), self._engine()
        feed.num_sent += 1
        return message

    def _engine(self) -> ReplicaEngine:
        failure = self.client.last_failure
        return ReplicaEngine(self.client.state, self.client.restarts, None if failure is None else failure.reason)

    def load(self, without: IngressFeed | None = None) -> ReplicaLoad:
        """The load that all ingresses cause, or all but one. A prompt is queued until its first output."""
        groups = [group for group in self._groups if group.feed is not without]
        queued = sum(group.num_uncached_tokens for group in groups if not group.started)
        # The last step counts the blocks of its own requests, and no step follows the end of the last request.
        step = self.tracker.last_step
        free_blocks = self._num_blocks if step is None or not self._groups else step.free_blocks
        return ReplicaLoad(queued, len(groups), free_blocks)

    # -- engine -------------------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        """Receive an event of the engine."""
        if isinstance(event, PrefixCacheChanged):
            self._change_cache(event)
            return
        if isinstance(event, EngineStarted):
            self._change_cache(PrefixCacheChanged(event.time, [], list(self._cached)))
        encoded = msgspec.Raw(self._encoder.encode(event))  # Once for all feeds.
        for feed in self._feeds.values():
            feed.add_event(event, encoded)
            feed.changed.set()

    def _change_cache(self, event: PrefixCacheChanged) -> None:
        self._cached.difference_update(event.removed)
        self._cached.update(event.stored)
        for feed in self._feeds.values():
            stored, removed = feed.pending.stored, feed.pending.removed
            stored.difference_update(event.removed)
            removed.difference_update(event.stored)
            stored.update(event.stored)
            removed.update(event.removed)
            feed.changed.set()

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            group = self._groups.get(output.request_id)
            if group is None:
                continue
            self._measure(group, output)
            group.feed.pending.outputs.append(output)
            group.feed.changed.set()
            if output.finish_reason is not None:
                self._forget([output.request_id])

    def _measure(self, group: ReplicaGroup, output: EngineCoreOutput) -> None:
        """Measure the service of an output, and with the first one also the service of its prompt."""
        num_new = 0
        if output.request_id not in group.started and (output.new_token_ids or output.pooled is not None):
            group.started.add(output.request_id)
            num_new = group.add.num_prompt_tokens - output.num_cached_tokens
        self.service.add(group.add.first.tenant, num_new, len(output.new_token_ids))

    def charge(self, service: Mapping[str, float]) -> None:
        """Charge tenants under fair sharing for the service that other replicas gave them since the last call."""
        self.client.send(ChargeTenants(dict(service)))

    def _fail(self, request_ids: list[str] | None, error: ChairliftError) -> None:
        """Report requests that the engine has lost; None: the engine is dead."""
        if request_ids is None:
            self._death, request_ids = str(error), unfinished_ids(self._groups)
        for feed in self._feeds.values():
            lost = [one for one in request_ids if (group := self._groups.get(one)) is not None and group.feed is feed]
            if lost:
                feed.pending.lost.append((lost, str(error)))
                self._forget(lost)
            feed.changed.set()  # the state of the engine has changed
