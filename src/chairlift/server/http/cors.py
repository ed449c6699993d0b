"""Cross-origin resource sharing: the web pages that may call the server (Fetch standard, section 3.3)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from chairlift.errors import ConfigError
from chairlift.options import check_options, option, parse_names

ANY: Final = "*"
EXPOSED_HEADERS: Final = ("Retry-After", "x-should-retry")
"""Response headers that pages may read in addition to the standard ones. Clients use them to retry."""

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~\w-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CorsOptions:
    """The CORS options of a server.

    Raises:
        ConfigError: a value is not an origin, method or header that a browser can send; credentials are allowed for
            every origin; or other options are given without origins.
    """

    OPTION_GROUP: ClassVar = "Browsers"

    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may call the server, as browsers send them, in a JSON list; * is every origin. "
        "Default: none.",
        parse=parse_names,
    )
    allowed_methods: tuple[str, ...] = option(
        (ANY,), "HTTP methods that these pages may use, as a JSON list. Default: all.", parse=parse_names
    )
    allowed_headers: tuple[str, ...] = option(
        (ANY,), "Headers that these pages may send, as a JSON list. Default: all.", parse=parse_names
    )
    allow_credentials: bool = option(False, "Allow these pages to send cookies and certificates.")

    def __post_init__(self) -> None:
        check_options(self)
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
