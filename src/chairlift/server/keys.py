"""Who asks: the API key of a call, as the rest of the server sees it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """The key of a call; `request.state.key`.

    Attributes:
        name: what people call it.
        tenant: what its requests are scheduled and counted under.
        is_admin: it may see the engine and everybody's requests.
    """

    name: str
    tenant: str
    is_admin: bool


ANYBODY = KeyInfo("", "", True)
"""Every caller of a server without keys."""


class KeyMiddleware:
    """Sets `request.state.key`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["key"] = ANYBODY
        await self._app(scope, receive, send)
