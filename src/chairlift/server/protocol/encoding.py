"""Responses and server-sent events as bytes.

The chunks of streams are plain values, which msgspec encodes, because serializing a pydantic model takes longer than
computing a token of a small model. The tests validate them with the types of the official clients.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from pydantic import BaseModel


def _plain_value(value: Any) -> Any:
    """A pydantic model as plain values. Large parts of a response are JSON already (`msgspec.Raw`), which is not the
    declared type of their fields."""
    if isinstance(value, BaseModel):
        return value.model_dump(warnings=False)
    raise NotImplementedError(f"{type(value)} cannot be written as JSON")


encode: Final = msgspec.json.Encoder(enc_hook=_plain_value).encode
"""Encodes plain values and pydantic models as JSON."""

DONE: Final = b"data: [DONE]\n\n"
"""The event that ends a stream of OpenAI's completions API."""


def to_chunk(value: Any) -> bytes:
    """One server-sent event without a type."""
    return b"data: %b\n\n" % encode(value)


def to_event(kind: str, **fields: Any) -> bytes:
    """One server-sent event with its type and these fields."""
    return to_named_event(kind, encode({"type": kind, **fields}))


def to_named_event(name: str, body: bytes) -> bytes:
    """One server-sent event with an event type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), body)
