"""How much a server takes in, and how long it waits for whom."""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Attributes:
    max_queued_requests: prompts that may wait for their first token; more get a 429.
    max_queued_tokens: tokens of those prompts.
    max_body_bytes, max_json_depth: of a request's body; checked before it is parsed.
    max_buffered_body_bytes: bodies of all requests together that are being received or prepared; more get a 503.
    max_header_bytes: of a request's line and headers.
    header_timeout: seconds that a client may take to send those, from when it connects; over TLS for the handshake, and
        then as many for the headers.
    body_timeout: seconds that it may take to send the body after them.
    write_timeout: seconds without taking anything of its answer, while `max_unsent_bytes` wait to be sent, after which
        a reader is cut off; over TLS also seconds that it may take to answer the end of a session.
    drain_timeout: seconds that a server which was told to stop goes on answering what it has taken in.
    share_prefix_cache: keys find prefixes that other keys computed.

    Raises:
        ConfigError: a value out of its bounds.
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


HELP = {
    "max_queued_requests": "Prompts that may wait for their first token; more get a 429.",
    "max_queued_tokens": "Tokens of the prompts that wait.",
    "max_body_bytes": "Of a request's body.",
    "max_json_depth": "Of a request's body.",
    "max_buffered_body_bytes": "Of the bodies of all requests that are being received or prepared; more get a 503.",
    "max_header_bytes": "Of a request's line and headers.",
    "max_unsent_bytes": "Of an answer that its reader does not take; then --write-timeout counts.",
    "header_timeout": "Seconds for a client to send its headers.",
    "body_timeout": "Seconds for it to send its body.",
    "write_timeout": "Seconds after which a reader that takes nothing is cut off.",
    "drain_timeout": "Seconds to answer what was taken in, after SIGTERM or Ctrl-C; a second one stops at once.",
    "share_prefix_cache": "Let API keys find prefixes that other keys computed (by the time it takes, they can tell).",
}
"""What each of them means, on the command line."""
