"""EngineChild: one run of an engine process, seen from the front end that started it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from chairlift import errors
from chairlift.config import EngineConfig
from chairlift.engine.process.engine_process import STACKS_FILE, EngineLaunch
from chairlift.engine.process.watchdog import Watchdog, main_frame
from chairlift.engine.process.wire import EngineFailed, EngineReady, FrontLink, LogLine
from chairlift.engine.served_engine import EngineFacts
from chairlift.errors import ConfigError, EngineDeadError
from chairlift.system.child_process import ChildProcess, python_command
from chairlift.system.control_groups import ControlGroups
from chairlift.system.memory_amounts import format_memory
from chairlift.system.memory_limits import limit_hint

ENGINE_COMMAND: Final = tuple(python_command("chairlift.engine.process.engine_process"))
STACK_DUMP_SECONDS: Final = 0.5
"""Time from `request_stack_dump` until the stacks are written."""

CONNECT_SECONDS: Final = 10.0
MAX_TEMPORARY_PATH: Final = 70
"""Maximum bytes of the path of the folder for temporary files, else /tmp is used: the path of a socket in it has at
most 104 on all systems."""

POLL_SECONDS: Final = 0.05
"""Interval in seconds between two checks of a process that starts, or whose last messages have not arrived."""

LAST_MESSAGE_SECONDS: Final = 10.0
"""Time limit for the last messages of a process that has exited: a fork of it keeps its connection open."""


class EngineChild:
    """An engine process in a separate session, so that Ctrl-C in a terminal does not reach it.

    Args:
        command: runs `engine_process.main`.
        log_level: the lowest level of the log lines that it sends.
        turn_folder: see ProcessClient.

    Raises:
        ConfigError: no folder for temporary files is writable.
        OSError: the operating system cannot start a process now.
    """

    def __init__(
        self, config: EngineConfig, command: Sequence[str], log_level: int, turn_folder: Path | None = None
    ) -> None:
        self.is_closed = False
        self._oom_kills = ControlGroups().oom_kills()
        self._last_message_deadline = math.inf
        with contextlib.ExitStack() as undo:
            self._folder = _make_private_folder()
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self.link = FrontLink(self._folder)
            undo.callback(self.link.close)
            self._process = ChildProcess(command, stdout=None, start_new_session=True)
            self._process.start()
            undo.callback(self._process.close)
            launch = EngineLaunch.create(config, self._folder, log_level, turn_folder)
            self._process.send(msgspec.json.encode(launch))
            undo.pop_all()
        self.kill = self._process.kill
        pid = self._process.pid
        assert pid is not None
        self.pid = pid

    @property
    def has_exited(self) -> bool:
        return self._process.pid is None or self._process.wait(0) is not None

    @property
    def has_ended(self) -> bool:
        """Whether the process has exited, and its last messages have arrived or their time has passed."""
        if not self.has_exited:
            return False
        now = time.monotonic()
        self._last_message_deadline = min(self._last_message_deadline, now + LAST_MESSAGE_SECONDS)
        return not self.link.has_sender or now >= self._last_message_deadline

    def notify_on_exit(self, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` on a separate thread when the process has exited."""

        def wait() -> None:
            self._process.wait()
            on_exit()

        threading.Thread(target=wait, name="chairlift-engine-watch", daemon=True).start()

    def exit_description(self) -> str:
        """The exit status or signal of the process, with the probable cause; waits for its exit."""
        status = self._process.wait()
        assert status is not None
        if status >= 0:
            return f"exit status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:  # most real-time signals have no name
            name = f"signal {-status}"
        return self._kill_description() if name == "SIGKILL" else name

    def _kill_description(self) -> str:
        groups = ControlGroups()
        limit = groups.memory_limit()
        where = "" if limit is None else f", where its control group allows {format_memory(limit)}"
        if groups.oom_kills() == self._oom_kills:
            return f"SIGKILL: out of memory{where}?"
        remedy = "lower kv_cache_memory_bytes" if limit is None else "lower kv_cache_memory_bytes or raise that limit"
        return f"SIGKILL: out of memory{where}; {remedy}"

    def request_stack_dump(self) -> None:
        """Make the process write the stacks of its threads, which takes up to STACK_DUMP_SECONDS."""
        if not self.has_exited:
            self._process.send_signal(signal.SIGUSR1)

    def stacks(self) -> str:
        """The stacks that the process has written; empty if there are none."""
        with contextlib.suppress(OSError):
            return (self._folder / STACKS_FILE).read_text()
        return ""

    def close(self, seconds: float) -> None:
        """Wait for the exit of the process, kill it after `seconds`, and remove its files. May be called again."""
        if self.is_closed:
            return
        self.is_closed = True
        self._process.wait(seconds)
        self._process.close()
        self.link.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def write_log_line(line: LogLine) -> None:
    """Write a line of the engine's log to the log of this process."""
    logging.getLogger(line.logger).log(line.level, "%s", line.text)


def log_stacks(stacks: str) -> None:
    """Log the position of an engine, and the stacks of its threads."""
    logging.getLogger("chairlift").error("the engine was %s; its threads:\n%s", main_frame(stacks), stacks)


def wait_for_facts(child: EngineChild, watchdog: Watchdog) -> EngineFacts:
    """Wait until the first engine process is ready; blocks, because there is no event loop yet.

    Args:
        watchdog: its timeout limits the start; its interval is POLL_SECONDS.

    Raises:
        ModelLoadError, ConfigError: as `build_engine`.
        EngineDeadError: the process ended for another reason, or was not ready in time.
    """
    while True:
        has_ended = child.has_ended  # The messages of a process that ends later may arrive later.
        message = child.link.receive()
        match message:
            case EngineReady(facts):
                if not child.link.has_receiver(CONNECT_SECONDS):
                    raise EngineDeadError(f"the engine process did not connect within {CONNECT_SECONDS:g} s")
                return facts
            case EngineFailed(text, kind):
                raise vars(errors)[kind](text)
            case LogLine():
                write_log_line(message)
            case None if not child.link.wait(POLL_SECONDS):
                _check_start(child, watchdog, has_ended)


def _check_start(child: EngineChild, watchdog: Watchdog, has_ended: bool) -> None:
    """Raise EngineDeadError if a process that is not ready has ended, or has exceeded its time."""
    if has_ended:
        remedy = f"; free some memory{hint}" if (hint := limit_hint()) else ""
        raise EngineDeadError(f"the engine process ended while it started ({child.exit_description()}){remedy}")
    if not watchdog.check(True):
        return
    child.request_stack_dump()
    time.sleep(STACK_DUMP_SECONDS)
    stacks = child.stacks()
    log_stacks(stacks)
    raise EngineDeadError(
        f"the engine is stuck: not ready {watchdog.timeout:g} s after its start, it was {main_frame(stacks)}; the log "
        "has the stacks of its threads. If it needs more time to start, raise --watchdog-timeout, or set it to 0 for "
        "no limit"
    )


def _make_private_folder() -> Path:
    try:
        is_short = len(os.fsencode(tempfile.gettempdir())) <= MAX_TEMPORARY_PATH
        return Path(tempfile.mkdtemp(prefix="chairlift-", dir=None if is_short else "/tmp"))
    except OSError as error:
        raise ConfigError(f"no folder for temporary files is writable: {error}. Set TMPDIR to a writable one") from None
