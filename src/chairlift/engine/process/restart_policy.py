"""RestartPolicy: when a dead engine process is restarted, and whether requests wait for the restart."""

from __future__ import annotations

from typing import Final

FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 30.0
MAX_WAIT_SECONDS: Final = 30.0
"""Requests do not wait for a restart that begins later than this after the failure."""

MAX_FAILURES: Final = 8
"""Number of failures in a row, each within STABLE_SECONDS of being ready, after which requests do not wait."""

STABLE_SECONDS: Final = 60.0


class RestartPolicy:
    """Restarts with exponential backoff: FIRST_BACKOFF seconds, doubled after each failure, up to LONGEST_BACKOFF.

    Requests are rejected after MAX_WAIT_SECONDS or MAX_FAILURES. From then on the engine is restarted every
    LONGEST_BACKOFF seconds without a limit, so a cause that disappears does not require a restart of the server.
    The policy reads no clock; the current time is an argument.
    """

    def __init__(self) -> None:
        self._num_failures = 0
        self._ready_time: float | None = None
        self._failure_time: float | None = None

    def record_ready(self, now: float) -> None:
        """Record that the engine serves requests."""
        self._ready_time = now
        self._failure_time = None

    def record_failure(self, now: float) -> tuple[float, bool]:
        """Record that the engine has died or could not be started.

        Returns:
            The seconds until the next restart, and whether requests wait for it. Otherwise they are rejected until the
            engine is ready again.
        """
        if self._failure_time is None:
            self._failure_time = now
        if self._ready_time is not None and now - self._ready_time >= STABLE_SECONDS:
            self._num_failures = 0
        self._ready_time = None
        self._num_failures += 1
        if self._num_failures <= MAX_FAILURES:
            delay = min(LONGEST_BACKOFF, FIRST_BACKOFF * 2 ** (self._num_failures - 1))
            if now + delay - self._failure_time <= MAX_WAIT_SECONDS:
                return delay, True
        return LONGEST_BACKOFF, False
