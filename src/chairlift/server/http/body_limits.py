"""Limits on the size and nesting depth of request bodies, which are checked before a body is parsed."""

from __future__ import annotations

from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import RequestError
from chairlift.structured_outputs import json_depth

LARGE_BODY: Final = 32 << 10
"""The size in bytes from which a body is parsed on a thread."""

MAX_JSON_DEPTH: Final = 64
"""The maximum nesting depth of arrays and objects in a body."""


def check_depth(body: bytes) -> None:
    """Raise RequestError if arrays and objects in a body are nested deeper than MAX_JSON_DEPTH."""
    if body.count(b"[") + body.count(b"{") > MAX_JSON_DEPTH and (depth := json_depth(body)) > MAX_JSON_DEPTH:
        problem = f"the request body has arrays and objects that are nested {depth} deep"
        raise RequestError(f"{problem}, and at most {MAX_JSON_DEPTH} levels are allowed: use fewer")


class BodyLimitMiddleware:
    """Raises HTTPException 413 when an endpoint reads a body that is larger than `max_bytes` (`max_body_bytes`).

    The connection stays open: uvicorn discards the rest of the body. If the connection were closed at once, the reset
    would make the client's kernel discard a response that the client has not read yet.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        num_received = 0

        async def receive_within_limit() -> Message:
            nonlocal num_received
            self._check(int(announced))  # uvicorn accepts only digits.
            message = await receive()
            num_received += len(message.get("body", b""))
            self._check(num_received)
            return message

        await self._app(scope, receive_within_limit, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            limit = f"{self._max_bytes} bytes (max_body_bytes)"
            raise HTTPException(413, f"the request body is larger than {limit}: send a smaller one")
