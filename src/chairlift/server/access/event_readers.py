"""Readers of event streams: their number for each key, and the end of those whose key was revoked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Final

from starlette.exceptions import HTTPException

from chairlift.server.access.keys import Key, KeyRing
from chairlift.server.http.streaming import EventStream

CHECK_SECONDS: Final = 0.5
MAX_READERS: Final = 16
"""The maximum number of open streams of one key."""


class EventReaders:
    """Opens streams of events, which end when their key is revoked or changed.

    Args:
        keys: the keys of the server, which can change while it runs.
    """

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys
        self._num_open: Counter[str] = Counter()

    def check(self, key: Key) -> None:
        """Check that a key can open another stream. Raises HTTPException if it has the maximum number."""
        if self._num_open[key.tenant] >= MAX_READERS:
            raise HTTPException(429, f"this key reads {MAX_READERS} event streams, the maximum: close one")

    def open(
        self, key: Key, source: AsyncGenerator[bytes, None], on_close: Callable[[], None] = lambda: None
    ) -> EventStream:
        """Create the response for a key, after `check`.

        Args:
            source: the events, at least one a second unless `on_close` ends them.
            on_close: called when the response has ended, and when the key of an open stream was revoked or changed.
        """
        self._num_open[key.tenant] += 1
        identity, loop = self._keys.identity(key), asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def check_key() -> None:
            nonlocal timer
            if self._keys.identity(key) != identity:
                on_close()
            timer = loop.call_later(CHECK_SECONDS, check_key)

        timer = loop.call_later(CHECK_SECONDS, check_key)

        def close() -> None:
            timer.cancel()
            self._num_open -= Counter({key.tenant: 1})
            on_close()

        return EventStream(self._while_valid(key, source), on_close=close)

    async def _while_valid(self, key: Key, source: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        identity = self._keys.identity(key)
        async with aclosing(source):
            async for event in source:
                if self._keys.identity(key) != identity:
                    return
                yield event
