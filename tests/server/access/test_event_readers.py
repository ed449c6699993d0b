"""Streams of events end when their key is revoked or changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from chairlift.server.access.event_readers import EventReaders
from chairlift.server.access.keys import Key, KeyRing, digest


def test_a_stream_whose_key_is_revoked_before_its_first_event_has_no_event() -> None:
    async def source() -> AsyncGenerator[bytes, None]:
        yield b"event"

    async def bodies(*keys: Key) -> list[bytes]:
        """The bodies of a stream that was opened with a key, where the server then has other keys."""
        sent: list[bytes] = []
        key = Key("ann", digest("secret"))
        ring = KeyRing([key])
        stream = EventReaders(ring).open(key, source())
        ring.replace(KeyRing(keys))

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        await stream({"type": "http"}, asyncio.Event().wait, send)
        return [body for body in sent if body]

    assert asyncio.run(bodies(Key("ann", digest("secret")))) == [b"event"]
    assert asyncio.run(bodies(Key("ann", digest("another")))) == []
    assert asyncio.run(bodies()) == []
