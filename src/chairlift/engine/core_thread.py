"""The engine core on a thread of its own: commands in, outputs out, nothing shared but records.

Commands and outputs are what would cross to another process, so the core can move into one.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from chairlift.core.engine_core import EngineCore
from chairlift.engine.input_processor import EngineRequest
from chairlift.errors import RequestError
from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason

logger = logging.getLogger("chairlift")


@dataclass(frozen=True, slots=True)
class Add:
    """Queue these siblings."""

    requests: list[EngineRequest]


@dataclass(frozen=True, slots=True)
class Abort:
    """End these requests."""

    request_ids: list[str]
    reason: FinishReason = FinishReason.ABORT


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; unfinished requests get an error."""


Command = Add | Abort | Stop


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
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="chairlift-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def send(self, command: Command) -> None:
        self._commands.put(command)

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self.send(Stop())
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if outputs := self._core.step():
                    self._on_outputs(outputs)
        except BaseException as error:
            logger.exception("the engine died")
            self._on_end(error)
        else:
            self._on_end(None)

    def _take_commands(self) -> None:
        """All commands there are; waits for one if there is no work."""
        while not self._stopping and not (self._commands.empty() and self._core.has_work):
            self._handle(self._commands.get())

    def _handle(self, command: Command) -> None:
        match command:
            case Add(requests):
                self._add(requests)
            case Abort(request_ids, reason):
                for request_id in request_ids:
                    self._core.abort(request_id, reason)
            case Stop():
                self._stopping = True

    def _add(self, requests: list[EngineRequest]) -> None:
        for request in requests:
            try:
                self._core.add(request.to_request())
            except RequestError as error:
                reason = FinishReason.ERROR.value
                refusal = EngineCoreOutput(
                    request.request_id, [], finish_reason=reason, error=str(error), error_param=error.param
                )
                self._on_outputs([refusal])
