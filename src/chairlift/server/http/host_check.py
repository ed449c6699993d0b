"""The middleware that checks the Host header (RFC 9112, section 3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.server.http.allowed_hosts import AllowedHosts, host_name
from chairlift.server.http.error_responses import RejectedHttpRequestError


class HostMiddleware:
    """Rejects requests with a wrong Host header, and closes their connection.

    The status is 400 if the header is missing, repeated or invalid, and 421 if the host is not allowed. Only requests
    of HTTP/1.0 and older versions may have no Host header.
    """

    def __init__(self, app: ASGIApp, allowed: AllowedHosts) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except RejectedHttpRequestError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        fields = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not fields and scope["http_version"] < "1.1":
            return
        if len(fields) != 1:
            problem = f"has {len(fields)} Host headers" if fields else "has no Host header"
            message = f"the request {problem}, and HTTP/{scope['http_version']} requires exactly one"
            raise RejectedHttpRequestError(400, message)
        host = host_name(fields[0])
        if host is None:
            message = f"the Host header must be a host with an optional port, got {fields[0]!r:.80}"
            raise RejectedHttpRequestError(400, message)
        if host not in self._allowed:
            names = ", ".join(self._allowed.patterns)
            message = (
                f"this server does not answer requests for host {host!r:.80}, only for {names}: use one of these, or "
                "start it with --allowed-hosts and that name"
            )
            raise RejectedHttpRequestError(421, message, code="host_not_allowed")
