"""EventHub: delivers the events of a serving engine on the event loop, in bounded memory, without delaying a step."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable

from chairlift.events import DroppableEvent, Event, EventSink

logger = logging.getLogger("chairlift")

PENDING_EVENTS = 16_384
"""Maximum number of events that wait for a busy event loop. Beyond it, droppable events are dropped."""


class EventHub:
    """Takes events on any thread and passes them to listeners on the event loop, in order.

    When the loop is too busy, `emit` drops events of type DroppableEvent and counts them in `num_dropped`; `publish`
    drops none. Events from before `open` are delivered by it.
    """

    def __init__(self) -> None:
        self.num_dropped = 0
        self._listeners: list[EventSink] = []
        self._pending: deque[Event] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_scheduled = False

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver events on this loop from now on. Call it on the loop."""
        self._loop = loop
        self._deliver()

    def add(self, listener: EventSink) -> None:
        """Call `listener.emit` on the loop for every event. A listener that raises is removed, with a log line."""
        self._listeners.append(listener)

    def remove(self, listener: EventSink) -> None:
        """Remove a listener; does nothing if it was not added."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def emit(self, event: Event) -> None:
        """Take an event. Every call must come from the same thread, which may be any."""
        if len(self._pending) >= PENDING_EVENTS and isinstance(event, DroppableEvent):
            self.num_dropped += 1
            return
        self._pending.append(event)
        if self._loop is None or self._is_scheduled:
            return
        # The flag is set before the call and cleared before the queue is read, so no event remains in the queue.
        self._is_scheduled = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._deliver)

    def publish(self, events: Iterable[Event]) -> None:
        """Pass events to the listeners at once. Call it on the loop."""
        for event in events:
            for listener in tuple(self._listeners):
                try:
                    listener.emit(event)
                except Exception:
                    logger.exception("a listener to the engine's events failed and was removed")
                    self.remove(listener)

    def _deliver(self) -> None:
        self._is_scheduled = False
        while self._pending:
            self.publish((self._pending.popleft(),))
