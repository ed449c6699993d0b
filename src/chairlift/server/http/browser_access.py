"""The hosts that requests may name, and the web pages that may call the server.

Starlette's TrustedHostMiddleware checks the hosts. This prevents DNS rebinding, in which a web page changes the address
of its own name to 127.0.0.1 after it was loaded. The browser then treats the page and a server on the loopback as one
origin, so that the page can read responses. Its requests still contain the name of the page in `Host`. Pages of other
origins need cross-origin resource sharing (Fetch standard, section 3.3).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chairlift.errors import ConfigError
from chairlift.options import parse_names, split_names
from chairlift.server.http.error_responses import error_response
from chairlift.server.protocol.base import ErrorInfo

ANY: Final = "*"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "*.localhost")
EXPOSED_HEADERS: Final = ("Retry-After", "x-should-retry")
"""Response headers that pages may read in addition to the standard ones. Clients use them to retry."""

_ALLOWED: Final = "chairlift.allowed_host"
_HOST: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*")
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


def parse_hosts(text: str, name: str = "allowed_hosts") -> tuple[str, ...]:
    """The patterns of a comma-separated or JSON list of hosts, without empty ones; see `parse_host`.

    Raises:
        ConfigError: there is no pattern, or one has another form.
    """
    patterns = tuple(map(parse_host, split_names(text, name)))
    if not patterns:
        raise ConfigError(f"{name} is empty, so every request would be rejected: name a host, or give *")
    return patterns


def parse_host(text: str) -> str:
    """The pattern of a name or an address without a port, in the spelling in which browsers send it.

    `*.example.com` matches every name below example.com, and `*` every host.

    Raises:
        ConfigError: the pattern has another form.
    """
    pattern = text.strip().lower()
    try:
        return f"[{ipaddress.IPv6Address(pattern.strip('[]'))}]"
    except ValueError:
        if _HOST.fullmatch(pattern):
            return pattern
    raise ConfigError(
        f"allowed_hosts: {text.strip()!r} is not a host; write a name or an address without a port, *.example.com for "
        "every name below example.com, or * for every host"
    )


def parse_origins(text: str | Sequence[str], name: str = "allowed_origins") -> tuple[str, ...]:
    """The origins of a JSON list.

    Raises:
        ConfigError: a value is not an origin that a browser can send.
    """
    origins = parse_names(text, name)
    for origin in origins:
        if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{name}: {origin!r} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT in lower case, "
                'without a path or trailing slash, or "*" for every origin'
            )
    return origins


def allow_hosts(app: ASGIApp, hosts: Sequence[str]) -> ASGIApp:
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
