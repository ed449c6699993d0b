"""An engine in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineState, OnLost, OnOutputs
from chairlift.engine.process.commands import Command
from chairlift.engine.process.core_thread import EngineCoreThread
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import EngineDeadError, EngineUnavailableError
from chairlift.outputs import EngineCoreOutput


class ThreadClient:
    """Builds an engine and runs its steps on a thread. What breaks a step ends it for good."""

    def __init__(self, config: EngineConfig) -> None:
        self.events = EventHub()
        self.engine: Engine = build_engine(config, events=self.events)
        self.state: EngineState = "running"
        self.restarts = 0
        self.last_failure: str | None = None
        self.unavailable: EngineUnavailableError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core = EngineCoreThread(self.engine.core, self._tell, self._ended)

    @property
    def seconds_since_step(self) -> float:
        return time.monotonic() - self._core.last_step

    def now(self) -> float:
        return self.engine.core.now()

    def open(self, on_outputs: OnOutputs, on_lost: OnLost) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self.events.open(self._loop)
        self._core.start()

    def send(self, command: Command) -> None:
        self._core.send(command)

    def stop(self) -> None:
        self.state = "dead"
        if self._core.is_alive:
            self._core.stop()

    def close(self, seconds: float | None = None) -> None:
        """A thread cannot be killed: `seconds` has no effect."""
        self.stop()
        self._core.join()
        self.engine.close()

    def _tell(self, outputs: list[EngineCoreOutput]) -> None:
        """On the core's thread: the loop detokenizes."""
        self._on_loop(self._on_outputs, outputs)

    def _ended(self, error: BaseException | None) -> None:
        """On the core's thread."""
        if error is not None:
            self.state = "dead"
            self.last_failure = repr(error)
            self._on_loop(self._on_lost, None, EngineDeadError(f"the engine died: {error!r}"))

    def _on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        # A loop that was closed has no reader left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)
