"""Bodies of requests: how large, how deep, how slow; checked before anything parses them."""

from __future__ import annotations

import asyncio
import re
from itertools import accumulate
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import RequestError
from chairlift.server.limits import ServerLimits
from chairlift.server.protocol.base import ErrorBody, ErrorInfo

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes(1 if byte in b"[{" else 255 for byte in range(256))
BODILESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies mean nothing; they are not read."""

LARGE_BODY: Final = 32 << 10
"""Bytes from which a body is prepared off the event loop, by a preparation worker if there is one."""


def json_depth(body: bytes) -> int:
    """How deep arrays and objects are nested in a JSON text; in a text that is none, at least as deep as a parser can
    get before it finds out."""
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    signed = memoryview(brackets.translate(_STEPS)).cast("b")
    return max(accumulate(signed, initial=0))


def check_depth(body: bytes, limit: int) -> None:
    """Raise RequestError if arrays and objects in a body are nested deeper than `limit` (`max_json_depth`)."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    depth = json_depth(body)
    if depth > limit:
        raise RequestError(f"the body nests arrays and objects {depth} deep, and max_json_depth={limit}: flatten it")


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyLimitMiddleware:
    """Reads the whole body, within the limits, and hands it on; whoever exceeds them gets an answer and is cut off."""

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS_METHODS:
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(scope, receive)
        except _RefusedError as refusal:
            await _answer(refusal)(scope, receive, send)
            return
        if body is None:
            return
        first: Message | None = {"type": "http.request", "body": body, "more_body": False}

        async def replay() -> Message:
            nonlocal first
            if first is None:
                return await receive()
            message, first = first, None
            return message

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if the client went before its end."""
        limits = self._limits
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and (len(length) > 18 or int(length) > limits.max_body_bytes):
            raise self._too_large()
        parts = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts += message.get("body", b"")
                    if len(parts) > limits.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            problem = f"{len(parts)} bytes of the body came in {limits.body_timeout:g} s, and more is missing"
            raise _RefusedError(408, f"{problem}: send it faster") from None
        return bytes(parts)

    def _too_large(self) -> _RefusedError:
        limit = self._limits.max_body_bytes
        return _RefusedError(413, f"the body is larger than {limit} bytes (max_body_bytes): send less at once")


def _answer(refusal: _RefusedError) -> JSONResponse:
    info = ErrorInfo(message=str(refusal), type="invalid_request_error")
    headers = None if refusal.status == 400 else {"Connection": "close"}
    return JSONResponse(ErrorBody(error=info).model_dump(), status_code=refusal.status, headers=headers)
