"""The hosts that requests may name in the Host header, which Starlette's TrustedHostMiddleware checks.

The check prevents DNS rebinding, in which a web page changes the address of its own name to 127.0.0.1 after it was
loaded. The browser then treats the page and a server on the loopback as one origin, so that the page can read
responses. Its requests still contain the name of the page in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from chairlift.errors import ConfigError
from chairlift.options import split_names

ANY_HOST: Final = "*"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "*.localhost")

_PATTERN: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\*")


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
        if _PATTERN.fullmatch(pattern):
            return pattern
    raise ConfigError(
        f"allowed_hosts: {text.strip()!r} is not a host; write a name or an address without a port, *.example.com for "
        "every name below example.com, or * for every host"
    )
