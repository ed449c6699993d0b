"""Service-level objectives, and which answers keep them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.errors import ConfigError
from chairlift.lab.bench.serving.http_client import RequestRecord

SYNTAX: Final = "ttft:MS tpot:MS e2el:MS, each at most once"


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a good answer takes at most, in seconds; None: anything.

    Goodput is the rate of good answers: Zhong et al., DistServe (OSDI'24); the text form is that of vLLM's benchmark.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Objectives | None:
        """From texts like `ttft:500`, in milliseconds, also several in one with spaces or commas between them; None if
        there are none.

        Raises:
            ConfigError: a text is not an objective, names an unknown one, or one twice.
        """
        seconds: dict[str, float] = {}
        for text in (part for whole in texts for part in re.split(r"[\s,]+", whole) if part):
            name, _, value = text.partition(":")
            if name not in cls.__slots__ or name in seconds:
                raise ConfigError(f"goodput {text!r}: write {SYNTAX}")
            seconds[name] = _milliseconds(text, value) / 1e3
        return cls(**seconds) if seconds else None

    def are_met(self, call: RequestRecord) -> bool:
        """Failed calls are never good. An answer of a single token, or in one piece, has no TPOT to miss."""
        measured = ((self.ttft, call.ttft), (self.tpot, call.tpot), (self.e2el, call.e2e_latency))
        return call.is_answered and all(
            limit is None or seconds is None or seconds <= limit for limit, seconds in measured
        )


def _milliseconds(text: str, value: str) -> float:
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = -1.0
    if not milliseconds > 0:
        raise ConfigError(f"goodput {text!r}: {value!r} is no positive number of milliseconds; write {SYNTAX}")
    return milliseconds
