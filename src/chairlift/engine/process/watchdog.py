"""Watchdog: detects an engine that makes no progress; `write_state_dump` writes its state to a file."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.process.in_flight import InFlightRequests
from chairlift.events import EngineStarted, Event, Step

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


def write_state_dump(
    reason: str, started: EngineStarted | None, in_flight: InFlightRequests, events: Sequence[Event], stacks: str
) -> str:
    """Write a JSON file with an engine's limits, unfinished requests, last events and stacks; returns where it is, or
    why it cannot be written, for a message.

    The file is in the folder for temporary files. It contains ids and numbers, and no text of a prompt or an answer.

    Args:
        started: the limits; None if the engine is still starting.
    """
    steps = [event for event in events if isinstance(event, Step)]
    state = {
        "reason": reason,
        "engine": None if started is None else asdict(started),
        "running": [_describe_request(request) for request in in_flight.requests(have_started=True)],
        "waiting": [_describe_request(request) for request in in_flight.requests(have_started=False)],
        "last_step": asdict(steps[-1]) if steps else None,
        "last_events": [{"type": event.type, **asdict(event)} for event in events],
        "stacks": stacks.splitlines(),
    }
    try:
        number, path = tempfile.mkstemp(prefix="chairlift-state-", suffix=".json")
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
    except OSError as error:
        return f"its state cannot be written: {error}"
    return f"its state is in {path}"


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


def _describe_request(request: EngineRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "arrival_time": request.arrival_time,
        "priority": request.priority,
    }
