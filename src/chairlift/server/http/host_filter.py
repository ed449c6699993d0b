"""The check of the hosts that requests name.

This prevents DNS rebinding, in which a web page changes the address of its own name to 127.0.0.1 after it was loaded.
The browser then treats the page and a server on the loopback as one origin, so that the page can read responses. Its
requests still contain the name of the page in `Host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.http.error_responses import error_response
from chairlift.server.protocol.base import ErrorInfo

_ALLOWED: Final = "chairlift.allowed_host"


def host_filter(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """The application for requests to these hosts. Others get the status 400, with a message that names the option."""

    async def allow(scope: Scope, _receive: Receive, _send: Send) -> None:
        scope[_ALLOWED] = True

    async def discard(_message: Message) -> None:
        pass

    check = TrustedHostMiddleware(allow, hosts, www_redirect=False)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await check(scope, receive, discard)
        if scope.pop(_ALLOWED, False):
            await app(scope, receive, send)
            return
        text = "the Host header must name an allowed host (start the server with --allowed-hosts), got "
        info = ErrorInfo(message=f"{text}{Headers(scope=scope).get('host', '')!r:.80}", type="invalid_request_error")
        await error_response(scope, 400, info)(scope, receive, send)

    return call
