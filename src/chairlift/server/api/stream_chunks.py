"""Server-sent events, written by hand: a stream has one for each token, and a model of pydantic's costs more than the
token does. The tests hold what comes out against the client's types."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from chairlift.server.api.protocol import UsageInfo

encode: Final = msgspec.json.Encoder().encode
"""Plain JSON values to bytes."""

NULL: Final = b"null"
DONE: Final = b"data: [DONE]\n\n"
"""The event that ends a stream of OpenAI's completions API."""


def to_event(body: bytes) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % body


def to_named_event(name: str, body: dict[str, Any]) -> bytes:
    """One server-sent event with a type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(body))


def usage_bytes(usage: UsageInfo) -> bytes:
    """Token counts as JSON."""
    return usage.model_dump_json().encode()


class ChunkWriter:
    """Writes the chunks of one stream; what is the same in all of them is made once.

    Args:
        kind: the `object`.
        include_usage: then every chunk has a `usage`, which is null but in the last.
    """

    def __init__(self, kind: str, call_id: str, created: int, model: str, include_usage: bool) -> None:
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            encode(call_id),
            encode(kind),
            created,
            encode(model),
        )
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """One with a choice."""
        return self._head + choice + self._tail

    def chunk_with_usage(self, choice: bytes, usage: bytes) -> bytes:
        """One with a choice, or none, and the token counts."""
        return b'%b%b],"usage":%b}\n\n' % (self._head, choice, usage)

    def chunk_with_timings(self, timings: bytes) -> bytes:
        """One without a choice, which says how long it took."""
        return b'%b],"timings":%b}\n\n' % (self._head, timings)
