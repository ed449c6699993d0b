"""Writes JSON and server-sent events as bytes.

Streams do not use pydantic, because serializing a pydantic model takes longer than computing a token of a small model.
The tests validate the events with the types of the official clients.
"""

from __future__ import annotations

from typing import Final

import msgspec

encode: Final = msgspec.json.Encoder().encode
"""Encodes plain JSON values as bytes."""

NULL: Final = b"null"
DONE: Final = b"data: [DONE]\n\n"
"""The event that ends a stream of OpenAI's completions API."""


def to_named_event(name: str, body: bytes) -> bytes:
    """One server-sent event with an event type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
