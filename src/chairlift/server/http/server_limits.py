"""Limits of a server: the size of its queue and of requests, and the time that clients may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server. `HELP` describes each of them, with its unit.

    Raises:
        ConfigError: A limit is below its minimum.
    """

    max_queued_requests: int = 2048
    max_queued_tokens: int = 2_000_000
    max_body_bytes: int = 8 << 20
    max_json_depth: int = 64
    max_buffered_body_bytes: int = 64 << 20
    max_header_bytes: int = 64 << 10
    max_unsent_bytes: int = 256 << 10
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    drain_timeout: float = 60.0
    share_prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("max_queued_requests", 1),
            ("max_queued_tokens", 1),
            ("max_body_bytes", 1024),
            ("max_json_depth", 8),
            ("max_buffered_body_bytes", self.max_body_bytes),
            ("max_header_bytes", 1024),
            ("max_unsent_bytes", 4096),
            ("header_timeout", 0.05),
            ("body_timeout", 0.05),
            ("write_timeout", 0.05),
            ("drain_timeout", 0.0),
        ):
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")


HELP: Final = {
    "max_queued_requests": "Maximum number of prompts that wait for their first token. More get a 429.",
    "max_queued_tokens": "Maximum number of tokens of the prompts that wait for their first token. More get a 429.",
    "max_body_bytes": "Maximum size of a request body in bytes.",
    "max_json_depth": "Maximum nesting depth of arrays and objects in a request body.",
    "max_buffered_body_bytes": "Maximum total size in bytes of the bodies that are being received or prepared. "
    "More get a 503.",
    "max_header_bytes": "Maximum size in bytes of the request line and headers of a request.",
    "max_unsent_bytes": "Maximum number of response bytes that wait for a slow client. Then --write-timeout starts.",
    "header_timeout": "Seconds that a client may take to send its headers, and before that for the TLS handshake.",
    "body_timeout": "Seconds that a client may take to send its body.",
    "write_timeout": "Seconds without progress after which the connection of a client that does not read is closed.",
    "drain_timeout": "Seconds to answer the accepted requests after SIGTERM or Ctrl-C. A second signal ends them "
    "immediately.",
    "share_prefix_cache": "Share cached prefixes between API keys. A key can then infer prompts of other keys from "
    "response times.",
}
"""Help texts of the command line."""
