"""The record of one call of the API, which the layers of the server fill in, and the middleware that checks its key."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.access.keys import ANONYMOUS, NO_KEY, Key, KeyRing
from chairlift.server.http.error_responses import error_response, route_path
from chairlift.server.protocol.base import ErrorInfo

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/metrics", "/version", "/", "/chat", "/docs", "/openapi.json"})
"""Paths for probes and monitoring and the pages, which need no key. Their responses contain nothing about single
requests; the scripts of the pages ask for a key."""

PUBLIC_FILES = ("/page/", "/docs/")
"""The beginnings of the paths of the pages' scripts and styles."""

CLIENT_CLOSED_REQUEST = 499


def is_public(path: str) -> bool:
    """Whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_FILES)


@dataclass(slots=True)
class Call:
    """One call of the API, from its arrival to the end of its response. It is `request.state.call`.

    Attributes:
        key: its key; one without rights until `KeyMiddleware` has accepted the call.
        time: its beginning, in seconds since the epoch.
        request_id: the id of the header `x-request-id` of the client, or a random one. The id of its response ends in
            it, unless the body has another `request_id`.
        model_seconds: the time for which it waited for its model.
        id: the id of its response, once its requests are sent to the engine.
        finish_reason: that of its answer that finished first. For a stop string it is known before the engine's event.
        ignored: the fields of its body that have no effect.
        seconds: the duration until the last byte of the response was written.
        status: the status of the response; 499 if the client disconnected before it, or before the end of an answer.
        is_disconnected: the client disconnected before the end of the response.
        reason: the message of an error, without the value that the client sent.
    """

    method: str
    path: str
    client: str = ""
    headers: Headers = field(default_factory=Headers, repr=False)
    key: Key = NO_KEY
    time: float = 0.0
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    model_seconds: float = 0.0
    id: str | None = None
    finish_reason: str | None = None
    ignored: list[str] = field(default_factory=list)
    seconds: float = 0.0
    status: int = CLIENT_CLOSED_REQUEST
    is_disconnected: bool = False
    reason: str = ""

    @property
    def response_id(self) -> str:
        """The id in the headers of its response, which may be an error, and in the access log."""
        return self.id or self.request_id


def call_of(request: HTTPConnection) -> Call:
    """The call of a request."""
    call: Call = request.state.call
    return call


def require_admin(request: HTTPConnection, effect: str) -> None:
    """Raise HTTPException 403 if a request has no admin key."""
    if not call_of(request).key.is_admin:
        raise HTTPException(403, f"{request.url.path} {effect} and needs an admin key")


class KeyMiddleware:
    """Sets the key of a call, and answers 401 to requests without a valid key if the server has keys."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            secret = _secret(Headers(scope=scope))
            key = ANONYMOUS if not self._keys else None if secret is None else self._keys.find(secret)
            if key is None and not is_public(route_path(scope)):
                message = "this server requires an API key: send it as `Authorization: Bearer KEY`"
                if secret is not None:
                    message = "the API key is not known to this server: check it, or request one from the operator"
                info = ErrorInfo(message=message, type="invalid_request_error", code="invalid_api_key")
                await error_response(scope, 401, info, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope["state"]["call"].key = key or NO_KEY
        await self._app(scope, receive, send)


def _secret(headers: Headers) -> str | None:
    """The secret of a request: from `Authorization: Bearer` (OpenAI's clients) or `x-api-key` (Anthropic's clients)."""
    scheme, _space, bearer = headers.get("authorization", "").partition(" ")
    # Other whitespace is kept: in Latin-1 the last byte of some UTF-8 letters is a space.
    bearer = bearer.strip(" \t")
    header = bearer if scheme.lower() == "bearer" and bearer else headers.get("x-api-key")
    # Headers are decoded as Latin-1, but the hash of a secret was computed from its UTF-8 bytes.
    return None if header is None else header.encode("latin-1").decode("utf-8", "surrogateescape")
