"""Calls an ASGI application in this process, without a socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

logger = logging.getLogger("chairlift")

HEADERS = [(b"host", b"batch"), (b"content-type", b"application/json")]


@dataclass(slots=True)
class AsgiResponse:
    """The response to one call. Header names are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes) -> AsgiResponse:
    """POST a JSON body and return the whole response. The application sees a cancellation as a disconnected client."""
    response = AsgiResponse()
    parts: list[bytes] = []
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    try:
        await app(_scope(path, len(body)), receive, send)
    except Exception:
        if not response.status:
            raise
        # Starlette sends a response with status 500 and then raises the error again.
        logger.exception("POST %s failed with status %d", path, response.status)
    response.body = b"".join(parts)
    return response


def _scope(path: str, num_bytes: int) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [*HEADERS, (b"content-length", b"%d" % num_bytes)],
        "client": ("127.0.0.1", 0),
        "server": ("batch", 80),
    }
