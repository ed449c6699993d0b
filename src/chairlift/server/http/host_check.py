"""The check of the Host header: one, valid (RFC 9112, section 3.2), and of a host that the server answers for."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.api.protocol.base import ErrorBody, ErrorInfo
from chairlift.server.http.allowed_hosts import AllowedHosts, host_name


class _HostError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class HostMiddleware:
    """Answers a request with 400 whose Host header is missing, repeated or not valid, and with 421 if it names a host
    that is not allowed; then the connection is closed. Only HTTP/1.0 and older requests may come without a Host."""

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except _HostError as error:
                await _response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        fields = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not fields and scope["http_version"] < "1.1":
            return
        if len(fields) != 1:
            problem = f"has {len(fields)} Host headers" if fields else "has no Host header"
            raise _HostError(400, f"the request {problem}, and HTTP/{scope['http_version']} needs exactly one")
        host = host_name(fields[0])
        if host is None:
            raise _HostError(400, f"the Host header must be a host and perhaps a port, got {fields[0]!r:.80}")
        if not self._allowed.has(host):
            names = ", ".join(self._allowed.patterns)
            raise _HostError(
                421,
                f"this server does not answer requests for host {host!r:.80}, only for {names}: use one of these, or "
                "start it with --allowed-hosts and that name",
                "host_not_allowed",
            )


def _response(error: _HostError) -> JSONResponse:
    info = ErrorInfo(message=str(error), type="invalid_request_error", code=error.code)
    body = ErrorBody(error=info).model_dump()
    return JSONResponse(body, status_code=error.status, headers={"Connection": "close"})
