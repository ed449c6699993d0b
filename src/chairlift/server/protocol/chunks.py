"""The chunks of completions and chat completions, and responses and server-sent events as bytes.

Chunks are msgspec structs, because serializing a pydantic model takes longer than computing a token of a small model. A
field that is UNSET is left out. The tests validate the chunks with the types of the official clients.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from pydantic import BaseModel

from chairlift.server.protocol.base import Timings, UsageInfo


def _plain_value(value: Any) -> Any:
    """A pydantic model as plain values. Large parts of a response are JSON already (`msgspec.Raw`), which is not the
    declared type of their fields."""
    if isinstance(value, BaseModel):
        return value.model_dump(warnings=False)
    raise NotImplementedError(f"{type(value)} cannot be written as JSON")


encode: Final = msgspec.json.Encoder(enc_hook=_plain_value).encode
"""Encodes structs, pydantic models and plain values as JSON."""

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


class FunctionChunk(Struct):
    """The name of a function, in the first chunk of a call, and new arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallChunk(Struct):
    """The beginning of a tool call, or new arguments of one."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionChunk = msgspec.field(default_factory=FunctionChunk)


class ChatDelta(Struct, omit_defaults=True):
    """New parts of a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallChunk] | None = None


class ChunkChoice(Struct):
    """New output of one answer: `text` of a completion, or the `delta` of a message.

    The finish reason is followed by a stop reason only in the last chunk of an answer.
    """

    index: int
    text: str | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: Raw | dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Chunk(Struct):
    """A chunk. `usage` is null in all but the last one, if the request wants the token counts."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
