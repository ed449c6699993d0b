"""The middlewares that reject calls before their routes: by their hosts, keys and the sizes of their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.server.access.call import is_public
from chairlift.server.access.keys import ANONYMOUS, NO_KEY, KeyRing
from chairlift.server.http.error_responses import error_response, route_path
from chairlift.server.protocol.base import ErrorInfo

ALLOWED_HOST: Final = "chairlift.allowed_host"


def host_filter(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
    """The application for requests to these hosts. Others get the status 400, with a message that names the option.

    This prevents DNS rebinding, in which a web page changes the address of its own name to 127.0.0.1 after it was
    loaded. The browser then treats the page and a server on the loopback as one origin, so that the page can read
    responses. Its requests still contain the name of the page in `Host`.
    """

    async def allow(scope: Scope, _receive: Receive, _send: Send) -> None:
        scope[ALLOWED_HOST] = True

    async def discard(_message: Message) -> None:
        pass

    check = TrustedHostMiddleware(allow, hosts, www_redirect=False)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await check(scope, receive, discard)
        if scope.pop(ALLOWED_HOST, False):
            await app(scope, receive, send)
            return
        text = (
            "the Host header must name an allowed host: start the server with --allowed-hosts, or let the proxy send "
            f"an allowed one, as with nginx's proxy_set_header; got {Headers(scope=scope).get('host', '')!r:.80}"
        )
        info = ErrorInfo(message=text, type="invalid_request_error")
        await error_response(scope, 400, info)(scope, receive, send)

    return call


def key_filter(app: ASGIApp, keys: KeyRing) -> ASGIApp:
    """The application, whose calls get their keys. Those without a valid one get a 401 if the server has keys."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            secret = _secret(Headers(scope=scope))
            key = ANONYMOUS if not keys else None if secret is None else keys.find(secret)
            if key is None and not is_public(route_path(scope)):
                message = "this server requires an API key: send it as `Authorization: Bearer KEY`"
                if secret is not None:
                    message = "the API key is not known to this server: check it, or request one from the operator"
                info = ErrorInfo(message=message, type="invalid_request_error", code="invalid_api_key")
                await error_response(scope, 401, info, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope["state"]["call"].key = key or NO_KEY
        await app(scope, receive, send)

    return call


def _secret(headers: Headers) -> str | None:
    """The secret of a request: from `Authorization: Bearer` (OpenAI's clients) or `x-api-key` (Anthropic's clients)."""
    scheme, _space, bearer = headers.get("authorization", "").partition(" ")
    # Other whitespace is kept: in Latin-1 the last byte of some UTF-8 letters is a space.
    bearer = bearer.strip(" \t")
    header = bearer if scheme.lower() == "bearer" and bearer else headers.get("x-api-key")
    # Headers are decoded as Latin-1, but the hash of a secret was computed from its UTF-8 bytes.
    return None if header is None else header.encode("latin-1").decode("utf-8", "surrogateescape")


def body_limit(app: ASGIApp, max_bytes: int) -> ASGIApp:
    """The application, which gets HTTPException 413 when it reads a body that is larger than `max_body_bytes`.

    The connection stays open: uvicorn discards the rest of the body. If the connection were closed at once, the reset
    would make the client's kernel discard a response that the client has not read yet.
    """

    def check(num_bytes: int) -> None:
        if num_bytes > max_bytes:
            limit = f"{max_bytes} bytes (max_body_bytes)"
            raise HTTPException(413, f"the request body is larger than {limit}: send a smaller one")

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        announced = next((value for name, value in scope.get("headers", ()) if name == b"content-length"), b"0")
        num_received = 0

        async def receive_within_limit() -> Message:
            nonlocal num_received
            check(int(announced))  # uvicorn accepts only digits.
            message = await receive()
            num_received += len(message.get("body", b""))
            check(num_received)
            return message

        await app(scope, receive_within_limit, send)

    return call
