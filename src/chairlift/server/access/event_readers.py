"""Readers of event streams: their number for each key, and the end of those whose key was revoked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
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

    def open(self, key: Key, source: AsyncGenerator[bytes, None]) -> EventStream:
        """Create the response with the events of a source. Raises HTTPException if the key has the maximum number."""
        if self._num_open[key.tenant] >= MAX_READERS:
            raise HTTPException(429, f"this key reads {MAX_READERS} event streams, the maximum: close one")
        self._num_open[key.tenant] += 1
        events = self._while_valid(key, self._keys.identity(key), source)
        return EventStream(events, lambda: self._num_open.subtract((key.tenant,)))

    async def _while_valid(
        self, key: Key, identity: object, source: AsyncGenerator[bytes, None]
    ) -> AsyncIterator[bytes]:
        """The events until the source ends, or the key no longer has the identity."""
        async with aclosing(source):
            following = asyncio.ensure_future(anext(source, None))
            try:
                while True:
                    await asyncio.wait({following}, timeout=CHECK_SECONDS)
                    if self._keys.identity(key) != identity:
                        return
                    if following.done():
                        if (event := following.result()) is None:
                            return
                        yield event
                        following = asyncio.ensure_future(anext(source, None))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
