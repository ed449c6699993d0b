"""Cross-origin resource sharing: the web pages that may call the server (Fetch standard, section 3.3)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from chairlift.errors import ConfigError

ANY: Final = "*"
EXPOSED_HEADERS: Final = ("Retry-After", "x-should-retry")
"""Response headers that pages may read in addition to the standard ones. Clients use them to retry."""

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~\w-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CorsOptions:
    """The CORS options of a server.

    Attributes:
        allowed_origins: The origins whose pages may call the server, as browsers send them. "*" is every origin.
        allowed_methods, allowed_headers: The methods and headers that pages may send. "*" is all of them.
        allow_credentials: Whether pages may send cookies and certificates, for a proxy that requires them.

    Raises:
        ConfigError: A value is not an origin, method or header that a browser can send; credentials are allowed for
            every origin; or other options are given without origins.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = (ANY,)
    allowed_headers: tuple[str, ...] = (ANY,)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT "
                    'in lower case, without a path or trailing slash, or "*" for every origin'
                )
        for name in ("allowed_methods", "allowed_headers"):
            for word in getattr(self, name):
                if not _TOKEN.fullmatch(word):
                    raise ConfigError(
                        f'{name}: {word!r} is not a valid name; write names such as "POST", or "*" for all'
                    )
        if self.allow_credentials and ANY in self.allowed_origins:
            raise ConfigError(
                'allow_credentials with allowed_origins=["*"] lets every page act for its visitor: name the origins'
            )
        given = (self.allowed_methods, self.allowed_headers, self.allow_credentials)
        if not self.allowed_origins and given != ((ANY,), (ANY,), False):
            raise ConfigError(
                "allowed_methods, allowed_headers and allow_credentials have no effect without allowed_origins: name "
                "the origins, or omit these options"
            )

    def middleware_options(self) -> dict[str, Any]:
        """The arguments of Starlette's CORSMiddleware."""
        return {
            "allow_origins": self.allowed_origins,
            "allow_methods": self.allowed_methods,
            "allow_headers": self.allowed_headers,
            "allow_credentials": self.allow_credentials,
            "expose_headers": EXPOSED_HEADERS,
        }


def parse_list(name: str, text: str) -> tuple[str, ...]:
    """Parse the value of an option that is a JSON list of strings, as in vLLM.

    Args:
        name: The name of the option for the error.

    Raises:
        ConfigError: The text is not a JSON list of strings.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ConfigError(f"""{name} must be a JSON list of strings such as '["*"]', got {text!r}""")
    return tuple(found)
