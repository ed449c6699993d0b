"""One run of an engine process, as the front end that started it sees it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from chairlift import errors
from chairlift.config import EngineConfig
from chairlift.engine.process.engine_process import STACKS, EngineLaunch
from chairlift.engine.process.in_flight import InFlightRequests
from chairlift.engine.process.watchdog import Watchdog, main_frame, write_state_dump
from chairlift.engine.process.wire import (
    Address,
    EngineFacts,
    EngineReady,
    Link,
    LogLine,
    StartFailed,
    ToFront,
    open_front_link,
)
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError
from chairlift.system.control_groups import ControlGroups
from chairlift.system.memory_limits import limit_hint
from chairlift.worker.memory import format_memory

ENGINE_COMMAND: Final = (sys.executable, "-m", "chairlift.engine.process.engine_process")
STACKS_SECONDS: Final = 0.5
"""From `request_stack_dump` until they are written."""

CONNECT_SECONDS: Final = 10.0

GRACE_SECONDS: Final = 0.05
"""From the end of a process until its last words have come through the socket."""


class EngineChild:
    """Starts an engine process in a session of its own, where no Ctrl-C reaches it.

    Args:
        command: runs `engine_process.main`.
        log_level: of the least that it says.

    Raises:
        ConfigError: there is no folder for temporary files.
        OSError: the machine cannot start a process now.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str], log_level: int) -> None:
        self.is_closed = False
        self._oom_kills = ControlGroups().oom_kills()
        with contextlib.ExitStack() as undo:
            self._folder = _private_folder()
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.link, address = _link(self._folder)
            undo.callback(self.link.close)
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            undo.pop_all()
        assert self._process.stdin is not None
        launch = msgspec.json.encode(EngineLaunch.of(config, address, self._folder, log_level)) + b"\n"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(launch)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    def watch(self, on_end: Callable[[], None]) -> None:
        """Call `on_end` once it has ended, on a thread."""

        def wait() -> None:
            self._process.wait()
            on_end()

        threading.Thread(target=wait, name="chairlift-engine-watch", daemon=True).start()

    def exit_description(self) -> str:
        """How it ended, in words."""
        status = self._process.wait()
        if status >= 0:
            return f"exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:  # one of the real-time signals, most of which have no name
            name = f"signal {-status}"
        return self._why_killed() if name == "SIGKILL" else name

    def _why_killed(self) -> str:
        groups = ControlGroups()
        limit = groups.memory_limit()
        where = "" if limit is None else f", where its control group allows {format_memory(limit)}"
        if groups.oom_kills() == self._oom_kills:
            return f"SIGKILL: out of memory{where}?"
        way_out = "lower kv_cache_memory" if limit is None else "lower kv_cache_memory or raise that limit"
        return f"SIGKILL: out of memory{where}; {way_out}"

    def request_stack_dump(self) -> None:
        """Have it write down where its threads are, within STACKS_SECONDS."""
        if hasattr(signal, "SIGUSR1") and not self.has_exited:
            self._process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """What it has written down."""
        with contextlib.suppress(OSError):
            return (self._folder / STACKS).read_text()
        return ""

    def kill(self) -> None:
        self._process.kill()

    def close(self, seconds: float) -> None:
        """Wait until it has ended, that long; then make it. Removes what it left; may be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self.link.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def log_line(line: LogLine) -> None:
    """Write a line of the engine's log to this process's."""
    logging.getLogger(line.logger).log(line.level, "%s", line.text)


def _link(folder: Path) -> tuple[Link[ToFront], Address]:
    try:
        return open_front_link(folder)
    except zmq.ZMQError as error:  # which is no OSError
        raise OSError(error.errno, error.strerror) from None


def _private_folder() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="chairlift-"))
    except OSError as error:
        raise ConfigError(f"no folder for temporary files can be written ({error}): set TMPDIR to one") from None


def wait_for_facts(child: EngineChild, watchdog: Watchdog) -> EngineFacts:
    """Wait until the engine takes requests.

    Args:
        watchdog: its timeout bounds the start; its interval is GRACE_SECONDS.

    Raises:
        ModelLoadError, ConfigError: as `build_engine`.
        EngineDeadError: the process ended for another reason, or did not get ready in time.
    """
    while True:
        message = child.link.receive()
        match message:
            case EngineReady(facts):
                if not child.link.has_receiver(CONNECT_SECONDS):
                    raise EngineDeadError(f"the engine process did not connect within {CONNECT_SECONDS:g} s")
                return facts
            case StartFailed(kind, text):
                raise _as_raised(kind, text)
            case LogLine():
                log_line(message)
            case None if not child.link.wait(GRACE_SECONDS):
                _check_start(child, watchdog)


def _check_start(child: EngineChild, watchdog: Watchdog) -> None:
    """The process has been silent for GRACE_SECONDS and is not ready."""
    if child.has_exited:
        way_out = f"; free some memory{hint}" if (hint := limit_hint()) else ""
        raise EngineDeadError(f"the engine process ended while it started ({child.exit_description()}){way_out}")
    if not watchdog.is_stuck(True):
        return
    child.request_stack_dump()
    time.sleep(STACKS_SECONDS)
    stacks, limit = child.stacks(), watchdog.timeout
    reason = f"not ready {limit:g} s after it was started"
    try:
        where = f"all its threads are in {write_state_dump(reason, None, InFlightRequests(), [], stacks)}"
    except OSError as error:
        where = f"its state cannot be written: {error}"
    raise EngineDeadError(
        f"the engine hangs: {reason}, it was {main_frame(stacks)}; {where}. If it only needs longer, give it "
        f"--watchdog-timeout with more seconds, or 0 for no limit"
    )


def _as_raised(kind: str, message: str) -> ChairliftError:
    error: type[ChairliftError] = getattr(errors, kind)
    return error(message)
