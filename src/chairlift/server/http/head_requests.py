"""HEAD requests have the status and headers of GET."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


def head_as_get(app: ASGIApp) -> ASGIApp:
    """The application, in which HEAD has the response of GET without its body.

    The response is complete with its headers. Then uvicorn's `receive` reports a disconnect, which ends a stream.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await app(scope, receive, send)
            return

        async def send_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})

        await app({**scope, "method": "GET"}, receive, send_headers)

    return call
