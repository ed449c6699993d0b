"""Events for whoever watches a serving engine: on the event loop, bounded, and never in the way of a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable

from chairlift.events import DroppableEvent, Event, EventSink

logger = logging.getLogger("chairlift")

PENDING_EVENTS = 16_384
"""Events that wait for a busy event loop; beyond them, those that may be dropped are."""


class Subscription:
    """The events since it was made: `async for event in subscription`, until it is closed.

    Keeps the latest `maxsize` that were not read; `num_dropped` counts those that a slow reader has lost.
    """

    def __init__(self, hub: EventHub, maxsize: int) -> None:
        assert maxsize > 0
        self.num_dropped = 0
        self._hub = hub
        self._maxsize = maxsize
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    def emit(self, event: Event) -> None:
        if len(self._events) == self._maxsize:
            self._events.popleft()
            self.num_dropped += 1
        self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        """End the iteration, after what is still to be read."""
        self._is_closed = True
        self._changed.set()
        self._hub.remove(self)

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()


class EventHub:
    """Takes events on any thread and hands them to listeners on the event loop, in order.

    What the loop is too busy to take in time is dropped, if it is a DroppableEvent, and counted in `num_dropped`.
    Events from before `open` wait for it.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._listeners: list[EventSink] = []
        self._pending: deque[Event] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_woken = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand out events on this loop from now on; on the loop."""
        self._loop = loop
        self._deliver()

    def add(self, listener: EventSink) -> None:
        """Call `listener.emit` for every event, on the loop. One that raises is dropped, with a line in the log."""
        self._listeners.append(listener)

    def remove(self, listener: EventSink) -> None:
        """Call it no more; does nothing if it is not called."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def subscribe(self, maxsize: int) -> Subscription:
        """The events from now on, to be iterated; on the loop. Close it in the end."""
        subscription = Subscription(self, maxsize)
        self.add(subscription)
        return subscription

    def emit(self, event: Event) -> None:
        """Take an event, on any one thread."""
        if len(self._pending) >= PENDING_EVENTS and isinstance(event, DroppableEvent):
            self.num_dropped += 1
            return
        self._pending.append(event)
        if self._loop is None or self._is_woken:
            return
        # Set before the call and cleared before the queue is read: no event is left lying.
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._deliver)

    def publish(self, events: Iterable[Event]) -> None:
        """Hand events to the listeners at once; on the loop."""
        for event in events:
            for listener in tuple(self._listeners):
                self._tell(listener, event)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._pending:
            self.publish((self._pending.popleft(),))

    def _tell(self, listener: EventSink, event: Event) -> None:
        try:
            listener.emit(event)
        except Exception:
            logger.exception("a listener to the engine's events failed and gets no more of them")
            self.remove(listener)
