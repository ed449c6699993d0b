"""Limits on the size, nesting depth and duration of request bodies, which are checked before parsing."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from itertools import accumulate
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import RequestError
from chairlift.server.http.error_responses import RejectedHttpRequestError
from chairlift.server.http.server_limits import ServerLimits

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_DEPTH_CHANGES = bytes(1 if byte in b"[{" else 255 for byte in range(256))
BODILESS_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods whose bodies have no meaning (RFC 9110, section 9.3). They are not read."""

LARGE_BODY: Final = 32 << 10
"""The size in bytes from which a body is prepared by a preparation worker, or on a thread without workers."""


def json_depth(body: bytes) -> int:
    """The nesting depth of arrays and objects in a JSON text.

    For text that is not valid JSON it is at least the depth that a parser reaches before it fails.
    """
    brackets = _STRING.sub(b"", body).translate(None, _NOT_BRACKETS)
    signed = memoryview(brackets.translate(_DEPTH_CHANGES)).cast("b")
    return max(accumulate(signed, initial=0))


def check_depth(body: bytes, limit: int) -> None:
    """Raise RequestError if arrays and objects in a body are nested deeper than `limit` (`max_json_depth`)."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    depth = json_depth(body)
    if depth > limit:
        problem = f"the request body has arrays and objects that are nested {depth} deep"
        raise RequestError(f"{problem}, and max_json_depth={limit}: use fewer levels")


class BodyLimitMiddleware:
    """Reads the whole body of each request within the limits, and rejects requests beyond a limit.

    The bodies of all requests together are limited too. An endpoint that has parsed its body and does not keep it can
    call `request.state.release_body` to end the accounting of the body before the call ends.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits) -> None:
        self._app = app
        self._limits = limits
        self._num_buffered: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in BODILESS_METHODS:
            await self._app(scope, receive, send)
            return
        reservation = _BodyReservation(self._num_buffered, self._limits, _owner(scope))
        try:
            body = await self._read(scope, receive, reservation)
            if body is None:
                return
            # The list is the only reference to the body, so that its memory is freed as soon as it has been parsed.
            unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
            del body
            scope.setdefault("state", {})["release_body"] = reservation.release

            async def replay() -> Message:
                return unread.pop() if unread else await receive()

            await self._app(scope, replay, send)
        except RejectedHttpRequestError as error:
            await error.response()(scope, receive, send)
        finally:
            reservation.release()

    async def _read(self, scope: Scope, receive: Receive, reservation: _BodyReservation) -> bytes | None:
        """Read the body; return None if the client disconnects before its end."""
        limits = self._limits
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if length.isdigit() and (len(length) > 18 or int(length) > limits.max_body_bytes):
            raise self._too_large_error()
        parts = bytearray()
        try:
            async with asyncio.timeout(limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    if len(parts) + len(chunk) > limits.max_body_bytes:
                        raise self._too_large_error()
                    reservation.add(len(chunk))
                    parts += chunk
                    if not message.get("more_body", False):
                        return bytes(parts)
        except TimeoutError:
            problem = f"only {len(parts)} bytes of the body arrived within body_timeout={limits.body_timeout:g} s"
            raise RejectedHttpRequestError(408, f"{problem}: send it faster") from None

    def _too_large_error(self) -> RejectedHttpRequestError:
        limit = self._limits.max_body_bytes
        message = f"the request body is larger than {limit} bytes (max_body_bytes): send a smaller one"
        return RejectedHttpRequestError(413, message)


class _BodyReservation:
    """The bytes of one body in the accounting of all bodies.

    Args:
        num_buffered: The number of bytes of all bodies, by owner.
    """

    def __init__(self, num_buffered: Counter[str], limits: ServerLimits, owner: str) -> None:
        self._num_buffered = num_buffered
        self._limits = limits
        self._owner = owner
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Account for bytes of the body.

        A large body is rejected if all bodies together exceed the limit, or those of its owner exceed half of it, so
        that one owner cannot use the whole limit.

        Raises:
            RejectedHttpRequestError: With status 503.
        """
        if self._num_bytes + num_bytes >= LARGE_BODY:
            self._check_limits(num_bytes)
        self._num_bytes += num_bytes
        self._num_buffered[self._owner] += num_bytes

    def _check_limits(self, num_bytes: int) -> None:
        limit = self._limits.max_buffered_body_bytes
        owner_limit = max(limit // 2, self._limits.max_body_bytes)
        for count, bound in ((self._num_buffered.total(), limit), (self._num_buffered[self._owner], owner_limit)):
            if count + num_bytes > bound:
                problem = f"the request bodies that are being received or prepared have {count} bytes"
                advice = f"(max_buffered_body_bytes={limit}, half of it for one key or address): retry in 1 second"
                message = f"{problem}, and at most {bound} are allowed {advice}"
                headers = {"Retry-After": "1"}
                kind, code = "service_unavailable_error", "too_many_bodies"
                raise RejectedHttpRequestError(503, message, kind=kind, code=code, headers=headers)

    def release(self) -> None:
        """End the accounting of the body. Further calls have no effect."""
        self._num_buffered[self._owner] -= self._num_bytes
        self._num_bytes = 0
        if not self._num_buffered[self._owner]:
            del self._num_buffered[self._owner]


def _owner(scope: Scope) -> str:
    """The tenant of a request, or the address of its client on a server without keys."""
    call = scope.get("state", {}).get("call")
    client = scope.get("client")
    tenant = "" if call is None else call.key.tenant
    return tenant or ("" if client is None else str(client[0]))
