"""ThreadClient: runs an engine in a thread of the front end's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.engine_core import EngineCore
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineState, OnFailure, OnOutputs
from chairlift.engine.process.commands import Command, Stop
from chairlift.engine.process.core_loop import run_core
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import EngineDeadError, EngineUnavailableError
from chairlift.outputs import EngineCoreOutput

logger = logging.getLogger("chairlift")


class EngineCoreThread:
    """Runs the loop of an engine core in a thread, which shares only records with other threads.

    Args:
        on_outputs: called on the thread with the outputs of each step that has any; must not block.
        on_end: called on the thread when it ends, with the error that ended it, or None.
    """

    def __init__(
        self,
        core: EngineCore,
        on_outputs: Callable[[list[EngineCoreOutput]], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._core = core
        self._on_outputs = on_outputs
        self._on_end = on_end
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self.start, self.send, self.is_alive = self._thread.start, self._commands.put, self._thread.is_alive

    def stop(self) -> None:
        """End the thread after its current step, without waiting."""
        self.send(Stop())

    def join(self) -> None:
        """Wait until the thread has ended, if it was started."""
        if self.is_alive():
            self._thread.join()

    def take(self, wait: bool) -> Command | None:
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def _run(self) -> None:
        try:
            run_core(self._core, self, self._deliver)
        except BaseException as error:
            logger.exception("the engine died")
            self._on_end(error)
        else:
            self._on_end(None)

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        self.last_step = time.monotonic()
        if outputs:
            self._on_outputs(outputs)


class ThreadClient:
    """An EngineClient that builds an engine and runs its steps in a thread. A step that raises ends it for good."""

    def __init__(self, config: EngineConfig) -> None:
        self.events = EventHub()
        self.engine: Engine = build_engine(config, events=self.events)
        self.state: EngineState = "running"
        self.restarts = 0
        self.last_failure: str | None = None
        self.unavailable: EngineUnavailableError | None = None
        self.now = self.engine.core.now
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core = EngineCoreThread(self.engine.core, self._deliver, self._handle_end)

    @property
    def seconds_since_step(self) -> float:
        return time.monotonic() - self._core.last_step

    def open(self, on_outputs: OnOutputs, on_failure: OnFailure) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs = on_outputs
        self._on_failure = on_failure
        self.events.open(self._loop)
        self._core.start()

    def send(self, command: Command) -> None:
        self._core.send(command)

    def stop(self) -> None:
        self.state = "dead"
        if self._core.is_alive():
            self._core.stop()

    def close(self, seconds: float | None = None) -> None:
        """Stop the thread and wait for it. A thread cannot be killed, so `seconds` has no effect."""
        self.stop()
        self._core.join()
        self.engine.close()

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        """Pass outputs from the core's thread to the event loop, which detokenizes them."""
        self._call_on_loop(self._on_outputs, outputs)

    def _handle_end(self, error: BaseException | None) -> None:
        """Report the error that ended the core's thread; runs on that thread."""
        if error is not None:
            self.state = "dead"
            self.last_failure = repr(error)
            self._call_on_loop(self._on_failure, None, EngineDeadError(f"the engine died: {error!r}"))

    def _call_on_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no reader is left
            self._loop.call_soon_threadsafe(function, *arguments)
