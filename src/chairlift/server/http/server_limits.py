"""Limits of a server: the size of its queue and of requests, and the time to drain."""

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
    drain_timeout: float = 60.0
    share_prefix_cache: bool = False

    def __post_init__(self) -> None:
        for name, low in (
            ("max_queued_requests", 1),
            ("max_queued_tokens", 1),
            ("max_body_bytes", 1024),
            ("max_json_depth", 8),
            ("drain_timeout", 0.0),
        ):
            if not getattr(self, name) >= low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}")


HELP: Final = {
    "max_queued_requests": "Maximum number of prompts that wait for their first token. More get a 429.",
    "max_queued_tokens": "Maximum number of tokens of the prompts that wait for their first token. More get a 429.",
    "max_body_bytes": "Maximum size of a request body in bytes.",
    "max_json_depth": "Maximum nesting depth of arrays and objects in a request body.",
    "drain_timeout": "Seconds to answer the accepted requests after SIGTERM or Ctrl-C. A second signal ends them "
    "immediately.",
    "share_prefix_cache": "Share cached prefixes between API keys. A key can then infer prompts of other keys from "
    "response times.",
}
"""Help texts of the command line."""
