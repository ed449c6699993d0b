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


@dataclass(frozen=True, slots=True)
class CorsOptions:
    """The CORS options of a server.

    Raises:
        ConfigError: a value is not an origin that a browser can send.
    """

    OPTION_GROUP: ClassVar = "Browsers"

    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins of web pages that may call the server, as browsers send them, in a JSON list; * is every origin. "
        "Default: none.",
        parse=parse_names,
    )

    def __post_init__(self) -> None:
        check_options(self)
        for origin in self.allowed_origins:
            if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: {origin!r} is not an origin; write SCHEME://HOST or SCHEME://HOST:PORT "
                    'in lower case, without a path or trailing slash, or "*" for every origin'
                )

    def middleware_options(self) -> dict[str, Any]:
        """The arguments of Starlette's CORSMiddleware."""
        return {
            "allow_origins": self.allowed_origins,
            "allow_methods": (ANY,),
            "allow_headers": (ANY,),
            "expose_headers": EXPOSED_HEADERS,
        }
