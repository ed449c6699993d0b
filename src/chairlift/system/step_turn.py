"""StepTurn: a lock between processes that use the same CPU cores, of which one computes at a time."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, TextIO

MAX_WAIT_SECONDS: Final = 10.0
FIRST_PAUSE_SECONDS: Final = 50e-6
LONGEST_PAUSE_SECONDS: Final = 1e-3


class StepTurn:
    """A lock between processes. Two processes that always need it hold it alternately.

    A process acquires the file lock `next`, then `now`, and then releases `next`. While one process holds `now`, the
    process that waits for it holds `next`, and therefore acquires `now` before the first process can acquire it again.
    The operating system releases the locks of a process that ends. A process waits for at most MAX_WAIT_SECONDS and
    then continues without the lock. It does not wait again until the lock was free once, so that a process that hangs
    delays each of the others only once.

    Args:
        folder: contains the files of the locks, for all processes.
        now, sleep: the clock in seconds, and a function that waits for some seconds of it.
    """

    def __init__(
        self,
        folder: Path,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = now
        self._sleep = sleep
        self._next = (folder / "next").open("w")
        self._now = (folder / "now").open("w")
        self._was_free = True

    def __enter__(self) -> None:
        deadline = self._clock() + (MAX_WAIT_SECONDS if self._was_free else 0.0)
        has_next = self._lock(self._next, deadline)
        self._was_free = self._lock(self._now, deadline)
        if has_next:
            fcntl.flock(self._next, fcntl.LOCK_UN)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fcntl.flock(self._now, fcntl.LOCK_UN)

    def close(self) -> None:
        """Release the locks and close the files."""
        self._next.close()
        self._now.close()

    def _lock(self, file: TextIO, deadline: float) -> bool:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if self._clock() >= deadline:
                    return False
                self._sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
