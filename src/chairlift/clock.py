"""Time is passed in. Whoever runs the loop owns a clock; policy never reads one."""

from __future__ import annotations

import time
from typing import Protocol


def format_duration(seconds: float) -> str:
    """A time with its first digits: 0.04 -> "40 ms"."""
    if seconds >= 0.95:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.2g} ms"


class Clock(Protocol):
    """Seconds on a scale that only moves forward."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is advanced: for tests and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`; raises ValueError if that is negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds})")
        self._now += seconds
