"""The check at the door: who brings which API key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.access.keys import ANONYMOUS, KeyInfo, KeyRing
from chairlift.server.api.protocol.base import ErrorBody, ErrorInfo

PUBLIC_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""What a supervisor or a scraper reads, without a key; it says nothing of anybody's requests."""


class KeyMiddleware:
    """Sets `request.state.key`, and sends away whoever has no key, where the server has any."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            key = self._key(scope)
            if key is None:
                await _refusal(Headers(scope=scope))(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = key
        await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> KeyInfo | None:
        if not self._keys:
            return ANONYMOUS
        secret = _secret(Headers(scope=scope))
        found = None if secret is None else self._keys.find(secret)
        if found is None and scope["path"] in PUBLIC_PATHS:
            return KeyInfo("", "", False)
        return found


def _secret(headers: Headers) -> str | None:
    """What the caller brought: `Authorization: Bearer ...`, as OpenAI's clients send it, or `x-api-key`, as Anthropic's
    do."""
    scheme, _space, secret = headers.get("authorization", "").partition(" ")
    secret = secret.strip(" \t")  # and no more: to Latin-1 the bytes of some letters end in a space
    if scheme.lower() == "bearer" and secret:
        return _as_hashed(secret)
    other = headers.get("x-api-key")
    return None if other is None else _as_hashed(other)


def _as_hashed(header: str) -> str:
    """Headers are read as Latin-1; a secret's bytes are those that its hash was made of."""
    return header.encode("latin-1").decode("utf-8", "surrogateescape")


def _refusal(headers: Headers) -> JSONResponse:
    if _secret(headers) is None:
        message = "this server asks for an API key: send it as `Authorization: Bearer KEY`"
    else:
        message = "the API key is not known here: check it, or ask the operator for one"
    body = ErrorBody(error=ErrorInfo(message=message, type="invalid_request_error", code="invalid_api_key"))
    answer = {"WWW-Authenticate": "Bearer", "Connection": "close"}
    return JSONResponse(body.model_dump(), status_code=401, headers=answer)
