"""ThreadClient: runs an engine in a thread of the front end's process."""

from __future__ import annotations

import logging
import queue
import threading
from functools import partial

from chairlift.config import EngineConfig
from chairlift.engine.process.client import EngineClient
from chairlift.engine.process.commands import Command, Stop
from chairlift.engine.process.core_loop import CoreLoop
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import EngineDeadError, Failure
from chairlift.outputs import EngineCoreOutput

logger = logging.getLogger("chairlift")


class ThreadClient(EngineClient):
    """Builds an engine and runs its steps in a thread, which shares only records with other threads. A step that raises
    ends the engine for good."""

    engine: Engine

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self.engine = build_engine(config, events=self.events)
        self.state = "running"
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)
        self._last_step = self.now()

    def _start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        self.state = "dead"
        if self._thread.is_alive():
            self.send(Stop())

    def close(self, seconds: float | None = None) -> None:
        """Stop the thread and wait for it. A thread cannot be killed, so `seconds` has no effect."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()
        self.engine.close()

    # -- on the engine's thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            reply = partial(self._call_on_loop, self._on_adapter_result)
            loader, reopen = self.engine.adapter_loader, self.engine.reopen_files
            CoreLoop(
                self.engine.core, self._take, self._deliver, adapters=loader, reply=reply, reopen_files=reopen
            ).run()
        except BaseException as error:
            failure = self.last_failure = Failure(repr(error))
            logger.exception("the engine died: %s", failure)
            self.state = "dead"
            texts = (f"the engine died: {text}" for text in failure.texts)
            self._call_on_loop(self._on_failure, None, EngineDeadError(*texts))

    def _take(self, wait: bool) -> Command | None:
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        """Pass outputs to the event loop, which detokenizes them."""
        self._last_step = self.now()
        if outputs:
            self._call_on_loop(self._on_outputs, outputs)
