"""The hosts that requests may name in the Host header, which prevents DNS rebinding.

In DNS rebinding a web page changes the address of its own name to 127.0.0.1 after it was loaded. The browser then
treats the page and a server on the loopback as one origin, so that the page can read responses. Its requests still
contain the name of the page in `Host`.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError

ANY: Final = "*"
LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]", "*.localhost")

_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._~!$&'()*+,;=%-]*)(?::\d{0,5})?", re.IGNORECASE)
_PATTERN: Final = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")


def host_name(field: str) -> str | None:
    """The host of a Host header in lower case, without port and final dot; None if the header is invalid."""
    found = _HOST.fullmatch(field)
    return None if found is None else _normalized(found[1])


def _normalized(host: str) -> str | None:
    """The canonical spelling of a host; None if it has brackets but is not an IPv6 address."""
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
        patterns: Names or addresses without a port. `*.example.com` matches every name below example.com, and `*`
            every host. Patterns are stored without duplicates, in the spelling of `host_name`.

    Raises:
        ConfigError: There is no pattern, or one has another form.
    """

    patterns: tuple[str, ...] = (ANY,)

    def __post_init__(self) -> None:
        if not self.patterns:
            raise ConfigError(
                "allowed_hosts is empty, so every request would be rejected: name a host, or give * for every host"
            )
        object.__setattr__(self, "patterns", tuple(dict.fromkeys(map(_checked, self.patterns))))

    def __contains__(self, host: str) -> bool:
        """Whether `host`, in the spelling of `host_name`, is allowed."""
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
    """The patterns of a comma-separated list, without empty ones."""
    return tuple(pattern for part in text.split(",") if (pattern := part.strip()))
