"""Proof of progress: an engine with unfinished work has to be heard of, and what it was at is written down if it is
not."""

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
    """Adds up silence between regular looks.

    A look that comes late counts as one in time: a front end that was held up itself, or a machine that slept, says
    nothing of the engine.

    Args:
        timeout: seconds of silence with unfinished work that are too many; 0: none are.
        interval: seconds between two looks, if somebody else has set them.
    """

    def __init__(self, timeout: float, interval: float | None = None) -> None:
        self.timeout = timeout
        self.interval = min(1.0, timeout / 4) if interval is None else interval
        self._silence = 0.0
        self._was_heard = False

    def heard(self) -> None:
        """The engine has done something."""
        self._was_heard = True

    def is_stuck(self, has_work: bool) -> bool:
        """Whether the silence is too long; to be asked every `interval` seconds."""
        self._silence = 0.0 if self._was_heard or not has_work else self._silence + self.interval
        self._was_heard = False
        if not self.timeout or self._silence < self.timeout:
            return False
        self._silence = 0.0
        return True


def write_state_dump(
    reason: str, started: EngineStarted | None, in_flight: InFlightRequests, events: Sequence[Event], stacks: str
) -> Path:
    """A JSON file in the folder for temporary files: an engine's limits, what it had to do, its last events, its
    threads. It has no limits yet while it starts.

    Holds ids and numbers only, nothing of any prompt or answer.
    """
    steps = [event for event in events if isinstance(event, Step)]
    state = {
        "reason": reason,
        "engine": None if started is None else asdict(started),
        "running": [_shown(request) for request in in_flight.begun],
        "waiting": [_shown(request) for request in in_flight.waiting],
        "last_step": asdict(steps[-1]) if steps else None,
        "last_events": [{"type": event.type, **asdict(event)} for event in events],
        "stacks": stacks.splitlines(),
    }
    number, path = tempfile.mkstemp(prefix="chairlift-state-", suffix=".json")
    with os.fdopen(number, "w", encoding="utf-8") as file:
        json.dump(state, file, indent=1)
    return Path(path)


def main_frame(stacks: str) -> str:
    """Where the main thread is in Chairlift's own code, out of what faulthandler wrote, as "in name (file:line)"."""
    main_thread = stacks.rpartition("(most recent call first)")[2]  # threads come youngest first
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
    own = [frame for frame in frames if Path(frame[0]).is_relative_to(PACKAGE)]
    for path, line, name in own or frames:
        return f"in {name} ({Path(path).name}:{line})"
    return "not far enough to say where"


def _shown(request: EngineRequest) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "num_prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "arrival_time": request.arrival_time,
        "priority": request.priority,
    }
