"""The check of the Host header: one, valid (RFC 9112, section 3.2), and a name that this server is meant to be called.

The last part stops DNS rebinding: a page of a foreign name, whose address is changed to 127.0.0.1 once the page is
loaded, is of the same origin as a server on the loopback for its browser. It can read all answers, but its calls carry
the foreign name in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.errors import ConfigError
from chairlift.server.protocol.base import ErrorBody, ErrorInfo

ANY: Final = "*"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "*.localhost")

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._~!$&'()*+,;=%-]*)(?::\d{0,5})?", re.IGNORECASE)
_PATTERN: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")


def host_name(field: str) -> str | None:
    """The host of a Host header: in lower case, without port and final dot; None if the header is not valid."""
    found = _HOST.fullmatch(field)
    return None if found is None else _normalized(found[1])


def _normalized(host: str) -> str | None:
    """One spelling of a host; None for brackets around what is not an IPv6 address."""
    if not host.startswith("["):
        return host.lower().removesuffix(".")
    try:
        return f"[{ipaddress.IPv6Address(host[1:-1])}]"
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts that requests may name.

    Attributes:
        patterns: names or addresses without a port; `*.example.com` is every name below example.com, `*` every host.

    Raises:
        ConfigError: no pattern, or one that is not of these forms.
    """

    patterns: tuple[str, ...] = (ANY,)

    def __post_init__(self) -> None:
        if not self.patterns:
            raise ConfigError("allowed_hosts is empty, so that no request would be answered: name a host, or *")
        object.__setattr__(self, "patterns", tuple(map(_checked, self.patterns)))

    def has(self, host: str) -> bool:
        """Whether `host`, as `host_name` returns it, is one of them."""
        if ANY in self.patterns or host in self.patterns:
            return True
        return any(pattern.startswith("*.") and host.endswith(pattern[1:]) for pattern in self.patterns)


def _checked(pattern: str) -> str:
    if pattern == ANY:
        return pattern
    is_bare_ipv6 = pattern.count(":") > 1 and not pattern.startswith("[")
    found = _normalized(f"[{pattern}]" if is_bare_ipv6 else pattern)
    if found is None or not _PATTERN.fullmatch(found):
        raise ConfigError(
            f"allowed_hosts: {pattern!r} is not a host; write a name or an address without a port, *.example.com for "
            "every name below example.com, or * for every host"
        )
    return found


def parse_hosts(text: str) -> tuple[str, ...]:
    """The patterns of a comma-separated list."""
    return tuple(pattern for part in text.split(",") if (pattern := part.strip()))


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
