"""Clocks and durations. The step loop reads a clock and passes the time on; the scheduler never reads one."""

from __future__ import annotations

import time
from typing import Protocol


def format_duration(seconds: float) -> str:
    """A duration with a unit that fits its size: 0.04 -> "40 ms", 2.5 -> "2.5 s"."""
    if seconds >= 0.95:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.0095 else f"{seconds * 1e3:.2g} ms"


class Clock(Protocol):
    """A clock in seconds that never moves backwards."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when it is advanced, for tests and simulation."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds`; raises ValueError if they are negative."""
        if seconds < 0:
            raise ValueError(f"seconds must not be negative, got {seconds}")
        self._now += seconds
