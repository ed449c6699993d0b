"""The engine in a separate process: `python -m chairlift.engine.process.engine_process`, started by a ProcessClient.

The first frame on standard input has the configuration of the engine and the folder of its sockets. Standard input
stays open as long as the front end runs; when it is closed, this process exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from chairlift.config import EngineConfig
from chairlift.core.engine_core import Executor
from chairlift.engine.grammar_gate import GrammarGate
from chairlift.engine.memory_trimming import trim_memory
from chairlift.engine.process.commands import Command
from chairlift.engine.process.core_loop import CoreLoop
from chairlift.engine.process.divided_outputs import divide_outputs
from chairlift.engine.process.wire import (
    EngineFailed,
    EngineReady,
    Link,
    LogLine,
    RequestsStarted,
    StepResult,
    open_engine_link,
    pack_events,
)
from chairlift.engine.served_engine import EngineFacts
from chairlift.errors import ChairliftError
from chairlift.events import Event
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from chairlift.system.child_process import ignore_shared_signals, read_frame
from chairlift.system.memory_limits import describe_out_of_memory, is_out_of_memory
from chairlift.system.step_turn import StepTurn

logger = logging.getLogger("chairlift")

LINGER_SECONDS: Final = 2.0
STACKS_FILE: Final = "stacks"

NO_TURN: Final[AbstractContextManager[None]] = nullcontext()


class EngineLaunch(msgspec.Struct):
    """The frame on standard input, as JSON. `folder` is private to the two processes, and the last one removes it."""

    config: dict[str, Any]
    folder: str
    log_level: int
    turn_folder: str | None

    @classmethod
    def create(cls, config: EngineConfig, folder: Path, log_level: int, turn_folder: Path | None) -> EngineLaunch:
        fields = json.loads(json.dumps(asdict(config), default=str))
        return cls(fields, str(folder), log_level, None if turn_folder is None else str(turn_folder))


class FrontEndLink:
    """The link of an engine core to the front end: takes its commands, and sends it a message for each step, or several
    if it has many logprobs, with the events since the last message."""

    def __init__(self, link: Link[Command]) -> None:
        self._link = link
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def take(self, wait: bool) -> Command | None:
        """Remove and return the next command. If there is none, wait for one, or return None unless `wait` is set."""
        while (command := self._link.receive()) is None and wait:
            if self._events:
                self.send_result([])
            self._link.wait()
        return command

    def send_result(self, outputs: list[EngineCoreOutput]) -> None:
        """Send the outputs of a step, even if there are none, because the message proves progress."""
        for part, is_continued in divide_outputs(outputs):
            self._link.send(StepResult(part, pack_events(self._events), is_continued))
            self._events = []

    def send_ready(self, facts: EngineFacts) -> None:
        self._link.send(EngineReady(facts))

    def send_started(self, request_ids: list[str]) -> None:
        """Send the ids of the requests that the next step computes for the first time."""
        self._link.send(RequestsStarted(request_ids))


class AnnouncingExecutor:
    """An executor that reports the new requests of a step before it is computed, because they are lost if it fails.

    Args:
        turn: is held while a step is computed.
    """

    def __init__(
        self, executor: Executor, on_start: Callable[[list[str]], None], turn: AbstractContextManager[None] = NO_TURN
    ) -> None:
        self._executor = executor
        self._on_start = on_start
        self._turn = turn

    def submit(self, output: SchedulerOutput) -> Any:
        if output.new_requests:
            self._on_start([request.request_id for request in output.new_requests])
        with self._turn:
            return self._executor.submit(output)

    def result(self, handle: Any) -> ModelRunnerOutput:
        return self._executor.result(handle)


class ForwardingLogHandler(logging.Handler):
    """Sends log lines to the front end, which writes them to its own log."""

    def __init__(self, link: Link[Command]) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        self._link.send(LogLine(record.levelno, record.name, self.format(record)))


def main() -> None:
    """Run an engine until the front end sends a Stop or exits."""
    ignore_shared_signals()  # Running requests must finish before this process stops.
    launch = msgspec.json.decode(read_frame(sys.stdin.buffer) or b"", type=EngineLaunch)
    threading.Thread(target=_exit_with_front_end, args=(launch.folder,), name="chairlift-lifeline", daemon=True).start()
    faulthandler.enable()
    link = open_engine_link(Path(launch.folder))
    logging.basicConfig(level=launch.log_level, handlers=[ForwardingLogHandler(link)], format="%(message)s")
    with Path(launch.folder, STACKS_FILE).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        # The turn of engines that use the same CPU cores. Without a folder it is always free.
        folder: AbstractContextManager[AbstractContextManager[None]] = nullcontext(NO_TURN)
        if launch.turn_folder is not None:
            folder = contextlib.closing(StepTurn(Path(launch.turn_folder)))
        with folder as turn:
            status = run(EngineConfig(**launch.config), link, turn)
    link.close(LINGER_SECONDS)
    zmq.Context.instance().term()
    sys.exit(status)


def run(config: EngineConfig, link: Link[Command], turn: AbstractContextManager[None] = NO_TURN) -> int:
    """Build an engine and run it over the link; returns the exit status of the process.

    Args:
        turn: is held while a step is computed or measured.
    """
    front_end = FrontEndLink(link)
    try:
        engine = _build(config, front_end, turn)
    except ChairliftError as error:
        link.send(EngineFailed(str(error), type(error).__name__))
        return 2
    except BaseException as error:
        if is_out_of_memory(error):
            link.send(EngineFailed(f"the engine cannot start: {describe_out_of_memory(error)}"))
            return 1
        logger.exception("the engine could not be started")
        link.send(EngineFailed(f"the engine could not be started: {error!r}"))
        return 1
    try:
        grammars = engine.loaded.grammars
        if grammars is not None:
            grammars.has_checker = False  # The front end has checked them.
        gate, loader = GrammarGate(grammars), engine.adapter_loader
        reopen = engine.reopen_files
        CoreLoop(engine.core, front_end.take, front_end.send_result, gate, loader, link.send, reopen).run()
    except BaseException as error:
        logger.exception("the engine died")
        link.send(EngineFailed(repr(error)))
        return 1
    finally:
        engine.close()
    return 0


def _build(config: EngineConfig, front_end: FrontEndLink, turn: AbstractContextManager[None]) -> Any:
    from chairlift.engine.startup.factory import build_engine

    engine = build_engine(
        config,
        events=front_end,
        around_executor=lambda inner: AnnouncingExecutor(inner, front_end.send_started, turn),
        turn=turn,
    )
    trim_memory()
    front_end.send_ready(engine.facts)
    return engine


def _exit_with_front_end(folder: str) -> None:
    """Exit when standard input is closed, which happens when the front end exits for any reason."""
    # An unbuffered read holds no lock of a buffer when the interpreter shuts down.
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()
