"""Which pages in browsers may call the server: cross-origin resource sharing (Fetch standard, section 3.3)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

from chairlift.errors import ConfigError

ANY: Final = "*"
EXPOSED_HEADERS: Final = ("Retry-After", "x-should-retry")
"""Of the answers, beside those that a page may read anyway: what clients go by when they try again."""

_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~\w-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class CorsOptions:
    """Attributes:
    allowed_origins: of the pages that may call, as browsers send them; "*" is every page, () none.
    allowed_methods, allowed_headers: what they may send; "*" is all.
    allow_credentials: they may send cookies and certificates, which something before this server may ask for.

    Raises:
        ConfigError: what no browser sends as an origin, a method or a header; credentials for every page; the other
            options without origins.
    """

    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = (ANY,)
    allowed_headers: tuple[str, ...] = (ANY,)
    allow_credentials: bool = False

    def __post_init__(self) -> None:
        for origin in self.allowed_origins:
            if origin not in (ANY, "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins: browsers send no origin {origin!r}; write SCHEME://HOST or SCHEME://HOST:PORT "
                    'in small letters, without a path or a slash at the end, or "*" for every page'
                )
        for name in ("allowed_methods", "allowed_headers"):
            for word in getattr(self, name):
                if not _TOKEN.fullmatch(word):
                    raise ConfigError(f'{name}: {word!r} is no name; write names such as "POST", or "*" for all')
        if self.allow_credentials and ANY in self.allowed_origins:
            raise ConfigError(
                'allow_credentials with allowed_origins=["*"] would let every page act as its visitor: name the origins'
            )
        self._check_effect()

    def _check_effect(self) -> None:
        given = (self.allowed_methods, self.allowed_headers, self.allow_credentials)
        if not self.allowed_origins and given != ((ANY,), (ANY,), False):
            raise ConfigError(
                "allowed_methods, allowed_headers and allow_credentials have no effect without allowed_origins: name "
                "the origins, or leave them out"
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
    """A list of strings as JSON, vLLM's form; raises ConfigError naming the option."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ConfigError(f"""{name} must be a JSON list of strings such as '["*"]', got {text!r}""")
    return tuple(found)


HELP: Final = {
    "allowed_origins": "Pages in browsers that may call, as a JSON list of origins; none if not given.",
    "allowed_methods": "HTTP methods that they may use, as a JSON list; all if not given.",
    "allowed_headers": "Headers that they may send, as a JSON list; all if not given.",
    "allow_credentials": "Let them send cookies and certificates.",
}
"""What each of them means, on the command line."""
