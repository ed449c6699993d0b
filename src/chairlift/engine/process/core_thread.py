"""The engine core on a thread of its own: commands in, outputs out, nothing shared but records."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from chairlift.core.engine_core import EngineCore
from chairlift.engine.process.commands import Command, Stop
from chairlift.engine.process.core_loop import run_core
from chairlift.outputs import EngineCoreOutput

logger = logging.getLogger("chairlift")


class EngineCoreThread:
    """Runs `core.step` while there is work.

    Args:
        on_outputs: called on the core's thread with what each step gave; must not block.
        on_end: called on the core's thread when it ends, with the error that ended it, or None: no request gets
            anything any more.
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

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        """Have the thread end after the step it is in."""
        self.send(Stop())

    def join(self) -> None:
        """Wait until it has ended, if it was started."""
        if self.is_alive:
            self._thread.join()

    def take(self, wait: bool) -> Command | None:
        try:
            return self._commands.get(block=wait)
        except queue.Empty:
            return None

    def _run(self) -> None:
        try:
            run_core(self._core, self, self._tell)
        except BaseException as error:
            logger.exception("the engine died")
            self._on_end(error)
        else:
            self._on_end(None)

    def _tell(self, outputs: list[EngineCoreOutput]) -> None:
        self.last_step = time.monotonic()
        if outputs:
            self._on_outputs(outputs)
