"""Watchdog: detects an engine that makes no progress; `main_frame` finds its position in the stacks of its threads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).parents[2]


class Watchdog:
    """Counts the intervals in which an engine with work makes no progress.

    It counts intervals and not clock time, so a front end that was blocked, or a machine that was suspended, does not
    make a healthy engine look stuck.

    Args:
        timeout: seconds without progress after which the engine is stuck; 0: no limit.
        interval: seconds between two calls of `check`; None selects a quarter of the timeout, at most 1.
    """

    def __init__(self, timeout: float, interval: float | None = None) -> None:
        self.timeout = timeout
        self.interval = min(1.0, timeout / 4) if interval is None else interval
        self._silence = 0.0
        self._has_progressed = False

    def record_progress(self) -> None:
        """Record that the engine has finished a step or was started."""
        self._has_progressed = True

    def check(self, has_work: bool) -> bool:
        """Count one interval; returns whether the engine is stuck, and then starts counting again."""
        self._silence = 0.0 if self._has_progressed or not has_work else self._silence + self.interval
        self._has_progressed = False
        if not self.timeout or self._silence < self.timeout:
            return False
        self._silence = 0.0
        return True


def main_frame(stacks: str) -> str:
    """The innermost frame of the main thread in Chairlift's own code, as "in name (file:line)".

    Args:
        stacks: the output of faulthandler.
    """
    main_thread = stacks.rpartition("(most recent call first)")[2]  # faulthandler writes the youngest thread first
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
    own = [frame for frame in frames if Path(frame[0]).is_relative_to(PACKAGE)]
    for path, line, name in own or frames:
        return f"in {name} ({Path(path).name}:{line})"
    return "at an unknown position, because it wrote no stack"
