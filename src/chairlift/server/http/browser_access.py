"""The values of the options of hosts that requests may name, and of web pages that may call the server.

Pages of other origins need cross-origin resource sharing (Fetch standard, section 3.3).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from chairlift.errors import ConfigError
from chairlift.options import parse_names, split_names

ANY: Final = "*"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "*.localhost")
EXPOSED_HEADERS: Final = ("Retry-After", "x-should-retry", "x-request-id", "request-id")
"""Response headers that pages may read besides the standard ones: when to retry, and the id of an answer."""

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
