"""When an engine process that has died is started again, and how long requests wait for it. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 30.0
MAX_WAIT_SECONDS: Final = 30.0
"""Requests wait for no start of the engine that begins later than this after its death."""

MAX_FAILURES: Final = 8
"""Deaths in a row, each within STABLE_SECONDS of being ready, after which requests wait no longer."""

STABLE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """The next start of an engine that has died, or could not be started.

    Attributes:
        delay: seconds until then.
        can_wait: requests wait for it; otherwise they are refused until the engine is ready again.
    """

    delay: float
    can_wait: bool


class RestartPolicy:
    """Starts are FIRST_BACKOFF seconds apart, then twice as long each time, up to LONGEST_BACKOFF.

    Requests are refused after MAX_WAIT_SECONDS or MAX_FAILURES; from then on the engine is started every
    LONGEST_BACKOFF seconds, without a limit, so that a cause that goes away needs no restart of the server.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._ready_time: float | None = None
        self._death_time: float | None = None

    def ready(self, now: float) -> None:
        """The engine serves requests."""
        self._ready_time = now
        self._death_time = None

    def failed(self, now: float) -> RestartDecision:
        """The engine has died, or could not be started."""
        if self._death_time is None:
            self._death_time = now
        if self._ready_time is not None and now - self._ready_time >= STABLE_SECONDS:
            self._num_failures = 0
        self._ready_time = None
        self._num_failures += 1
        if self._num_failures <= MAX_FAILURES:
            delay = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (self._num_failures - 1))
            if now + delay - self._death_time <= MAX_WAIT_SECONDS:
                return RestartDecision(delay, can_wait=True)
        return RestartDecision(LONGEST_BACKOFF, can_wait=False)
