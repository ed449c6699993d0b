"""Removes the headers with which a client could control Ray Serve, and the request id that Ray Serve adds to answers.

Ray Serve calls `middlewares` for each of its HTTP servers, because deploy/ray/cluster.env names it.
"""

from __future__ import annotations

from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RAY_HEADERS: Final = (
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"x-session-id",
    b"serve-multiplexed-model-id",
)
"""Headers that Ray Serve obeys, of which Chairlift reads none. It answers values that are not UTF-8 with status 500."""

REQUEST_ID: Final = b"x-request-id"


class RayHeaderFilter:
    """An ASGI application that hides RAY_HEADERS, and a request id that is not ASCII, from another one.

    Of several request ids of a response, the first one remains: Ray Serve appends its own after the id of the answer.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if _passes(name, value)]}

        async def send_one_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [header for header in message["headers"] if header[0] == REQUEST_ID]
                kept = [header for header in message["headers"] if header[0] != REQUEST_ID or header is ids[0]]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, send_one_id)


def _passes(name: bytes, value: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    return name not in RAY_HEADERS and (name != REQUEST_ID or value.isascii())


def middlewares() -> list[Middleware]:
    """The middlewares of Ray Serve's HTTP servers."""
    return [Middleware(RayHeaderFilter)]
