"""Bodies of requests: how large, how deep, how slow; checked before anything parses them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from itertools import accumulate
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import RequestError
from chairlift.server.access.server_limits import ServerLimits
from chairlift.server.api.protocol.base import ErrorBody, ErrorInfo

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


class _RejectedBodyError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyLimitMiddleware:
    """Reads the whole body, within the limits, and passes it on; a request beyond a limit is rejected.

    Bodies of all requests together are limited as well. `request.state.release_body` ends the accounting of a body
    before its call ends, which an endpoint calls when it has read the body and keeps nothing of it.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app = app
        self._limits = limits
        self._num_buffered = 0
        self._num_buffered_by: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS_METHODS:
            await self._app(scope, receive, send)
            return
        share = _BodyReservation(self, _owner(scope))
        try:
            body = await self._read(scope, receive, share)
            if body is None:
                return
            first: Message = {"type": "http.request", "body": body, "more_body": False}
            del body
            scope.setdefault("state", {})["release_body"] = share.release
            await self._pass_on(first, scope, receive, send)
        except _RejectedBodyError as refusal:
            await _answer(refusal)(scope, receive, send)
        finally:
            share.release()

    async def _pass_on(self, message: Message, scope: Scope, receive: Receive, send: Send) -> None:
        first: Message | None = message
        del message

        async def replay() -> Message:
            nonlocal first
            if first is None:
                return await receive()
            message, first = first, None
            return message

        await self._app(scope, replay, send)

    def reserve(self, owner: str, num_bytes: int, is_large: bool) -> None:
        """Account for bytes of a body.

        A large body is rejected if all bodies together exceed the limit, or those of its owner exceed half of it, so
        that no owner takes it all.

        Raises:
            _RejectedBodyError: with status 503.
        """
        limit = self._limits.max_buffered_body_bytes
        share = max(limit // 2, self._limits.max_body_bytes)
        for count, bound in ((self._num_buffered, limit), (self._num_buffered_by[owner], share)):
            if is_large and count + num_bytes > bound:
                problem = f"the request bodies that are being read have {count} bytes, and at most {bound} are allowed"
                way_out = f"(max_buffered_body_bytes={limit}, half of it for one key or address): send this again"
                raise _RejectedBodyError(503, f"{problem} {way_out} in a second")
        self._num_buffered += num_bytes
        self._num_buffered_by[owner] += num_bytes

    def release(self, owner: str, num_bytes: int) -> None:
        """End the accounting of bytes that were reserved."""
        self._num_buffered -= num_bytes
        self._num_buffered_by[owner] -= num_bytes
        if not self._num_buffered_by[owner]:
            del self._num_buffered_by[owner]

    async def _read(self, scope: Scope, receive: Receive, share: _BodyReservation) -> bytes | None:
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
                    chunk = message.get("body", b"")
                    if len(parts) + len(chunk) > limits.max_body_bytes:
                        raise self._too_large()
                    share.add(len(chunk))
                    parts += chunk
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            problem = f"{len(parts)} bytes of the body came in {limits.body_timeout:g} s, and more is missing"
            raise _RejectedBodyError(408, f"{problem}: send it faster") from None
        return bytes(parts)

    def _too_large(self) -> _RejectedBodyError:
        limit = self._limits.max_body_bytes
        return _RejectedBodyError(413, f"the body is larger than {limit} bytes (max_body_bytes): send less at once")


class _BodyReservation:
    """The bytes that one body has in the middleware's account."""

    def __init__(self, middleware: BodyLimitMiddleware, owner: str) -> None:
        self._middleware = middleware
        self._owner = owner
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self._middleware.reserve(self._owner, num_bytes, is_large=self._num_bytes + num_bytes >= LARGE_BODY)
        self._num_bytes += num_bytes

    def release(self) -> None:
        self._middleware.release(self._owner, self._num_bytes)
        self._num_bytes = 0


def _owner(scope: Scope) -> str:
    """The tenant of a request's key; the address of its client on a server without keys."""
    key = scope.get("state", {}).get("key")
    client = scope.get("client")
    return getattr(key, "tenant", "") or ("" if client is None else str(client[0]))


def _answer(refusal: _RejectedBodyError) -> JSONResponse:
    if refusal.status == 503:
        info = ErrorInfo(message=str(refusal), type="service_unavailable_error", code="too_many_bodies")
        headers = {"Connection": "close", "Retry-After": "1"}
    else:
        info = ErrorInfo(message=str(refusal), type="invalid_request_error")
        headers = {"Connection": "close"}
    return JSONResponse(ErrorBody(error=info).model_dump(), status_code=refusal.status, headers=headers)
