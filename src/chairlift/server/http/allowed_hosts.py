"""The hosts that a server answers for, so that DNS rebinding fails.

A page of a foreign name, whose address is changed to 127.0.0.1 once the page is loaded, is of the same origin as a
server on the loopback for its browser. It can read all answers, but its calls carry the foreign name in `Host`.
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
            Each pattern is kept once, in the spelling of `host_name`.

    Raises:
        ConfigError: no pattern, or one that is not of these forms.
    """

    patterns: tuple[str, ...] = (ANY,)

    def __post_init__(self) -> None:
        if not self.patterns:
            raise ConfigError("allowed_hosts is empty, so that no request would be answered: name a host, or *")
        object.__setattr__(self, "patterns", tuple(dict.fromkeys(map(_checked, self.patterns))))

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
