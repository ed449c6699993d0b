"""Limits of a server: the size of its queue and of requests, and the time to drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chairlift.options import check_options, option


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server.

    Raises:
        ConfigError: a limit is below its minimum.
    """

    OPTION_GROUP: ClassVar = "Limits"

    max_queued_requests: int = option(
        2048, "Maximum number of prompts that wait for their first token. More get a 429.", minimum=1
    )
    max_queued_tokens: int = option(
        2_000_000, "Maximum number of tokens of the prompts that wait for their first token. More get a 429.", minimum=1
    )
    max_body_bytes: int = option(8 << 20, "Maximum size of a request body in bytes.", minimum=1024)
    drain_timeout: float = option(
        60.0,
        "Seconds to answer the accepted requests after SIGTERM or Ctrl-C. A second signal ends them immediately.",
        minimum=0.0,
    )
    share_prefix_cache: bool = option(
        False,
        "Share cached prefixes between API keys. A key can then infer prompts of other keys from response times.",
    )

    def __post_init__(self) -> None:
        check_options(self)
