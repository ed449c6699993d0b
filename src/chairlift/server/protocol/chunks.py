"""The chunks of completions and chat completions.

They are msgspec structs, because serializing a pydantic model takes longer than computing a token of a small model. A
field that is UNSET is left out. The tests validate the chunks with the types of the official clients.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from chairlift.server.protocol.base import Timings, UsageInfo


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
