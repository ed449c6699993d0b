"""The end of a server process within a limited time, even if a thread hangs, and its exit status.

first signal --drain_timeout--> the drain ends --FLUSH_SECONDS--> connections are closed --> exit status 0
                                     |--ENGINE_STOP_SECONDS--> the engine is killed if it has not ended
                                     |--EXIT_SECONDS--> if a thread still runs: EXIT_STILL_RUNNING
first signal ----------------drain_timeout + EXIT_SECONDS-------------> if no thread can run: SIGKILL by the guard (137)
second signal --FORCED_EXIT_SECONDS--> the last two
"""

from __future__ import annotations

import _thread
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import FrameType
from typing import Final, NoReturn

from chairlift.server.http import exit_guard

logger = logging.getLogger("chairlift")

EXIT_STILL_RUNNING: Final = 4
"""The exit status if a thread still ran when the time was over. The statuses 1 to 3 mean an unexpected error, an error
on the command line, and a failure of uvicorn to start."""

EXIT_SECONDS: Final = 5.0
"""Maximum seconds from the end of the drain until the process has ended."""

FORCED_EXIT_SECONDS: Final = 2.0
"""Maximum seconds from a second signal until the process has ended. In this time streams get an error event."""

SELF_EXIT_MARGIN_SECONDS: Final = 0.8
"""Seconds before these limits at which the process ends itself, so that it is not killed without an exit status."""

GUARD_MARGIN_SECONDS: Final = 0.3
"""Seconds before these limits at which the guard process begins to kill the server."""

MAX_GUARD_RESTARTS: Final = 3
"""The number of times that the guard process is started again."""

FLUSH_SECONDS: Final = 3
"""Seconds in which connections can send what was written to them after all calls were answered."""

ENGINE_STOP_SECONDS: Final = 3.5
"""Seconds in which the engine can finish its step and close its files. They begin with FLUSH_SECONDS."""

FORCED_FLUSH_SECONDS: Final = 1
"""FLUSH_SECONDS after a second signal."""
FORCED_ENGINE_STOP_SECONDS: Final = 0.8
"""ENGINE_STOP_SECONDS after a second signal."""
STANDARD_ERROR: Final = 2


class ProcessExit:
    """Limits the time that the process of a server takes to end. It must be created in the main thread.

    It starts the guard process, which ends by itself after this process. Without a guard process, on Windows or if it
    cannot be started, a thread that holds the interpreter lock can delay the end. This process keeps the reading end of
    the pipe to the guard process open, so that signals can be written while none runs.

    Args:
        drain_timeout: Seconds that calls in progress may take after the first signal.
    """

    def __init__(self, drain_timeout: float) -> None:
        self._wakeup: int | None = None
        if os.name != "posix":
            return
        faulthandler.register(signal.SIGUSR1, file=STANDARD_ERROR, all_threads=True)
        try:
            reading, self._wakeup = os.pipe()
        except OSError as error:
            logger.warning("%s", _no_guard(error))
            return
        os.set_blocking(self._wakeup, False)
        guarding = partial(_keep_guard_process, drain_timeout, reading)
        threading.Thread(target=guarding, name="guard-process", daemon=True).start()
        self.watch_signals()

    def watch_signals(self) -> None:
        """Send the numbers of signals to the guard process.

        An event loop in the main thread replaces the descriptor when it starts, so this must be called on the loop too.
        """
        if self._wakeup is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def limit(self, seconds: float) -> None:
        """End the process within `seconds` if it does not end by itself. The earliest of several limits applies.

        It can be called in a signal handler, so it uses no lock.
        """
        _thread.start_new_thread(_end_after, (seconds - SELF_EXIT_MARGIN_SECONDS,))

    def end_at_next_signal(self) -> None:
        """End the process immediately at the next SIGINT or SIGTERM. Called after the event loop has ended."""

        def end(_number: int, _frame: FrameType | None) -> NoReturn:
            end_process("another stop signal was received")

        for number in exit_guard.DRAIN_SIGNALS:
            signal.signal(number, end)


def _keep_guard_process(drain_timeout: float, signals: int) -> None:
    """Start the guard process, and start it again if it ends, at most MAX_GUARD_RESTARTS times.

    It runs in its own session, so that Ctrl-C at a terminal does not reach it.

    Args:
        drain_timeout: As for `ProcessExit`.
        signals: The descriptor from which it reads the numbers of signals.
    """
    limits = [str(seconds - GUARD_MARGIN_SECONDS) for seconds in (drain_timeout + EXIT_SECONDS, FORCED_EXIT_SECONDS)]
    command = [sys.executable, "-I", "-S", exit_guard.__file__, str(os.getpid()), *limits]
    for num_restarts in range(MAX_GUARD_RESTARTS + 1):
        try:
            process = subprocess.Popen(command, stdin=signals, stdout=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            logger.warning("%s", _no_guard(error))
            return
        status = process.wait()
        if num_restarts < MAX_GUARD_RESTARTS:
            logger.warning("the guard process %d ended (exit status %d) and is started again", process.pid, status)
    logger.warning("%s", _no_guard(f"it has ended {MAX_GUARD_RESTARTS + 1} times"))


def _no_guard(reason: object) -> str:
    return f"the guard process cannot be started ({reason}): a thread that hangs can delay the shutdown"


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    end_process(f"the process has not ended {seconds:g} s after the server stopped answering")


def end_process(reason: str) -> NoReturn:
    """End this process and its children with EXIT_STILL_RUNNING, without waiting for threads.

    Args:
        reason: The beginning of the logged message.
    """
    running = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
    logger.error(
        "%s: the process ends with exit status %d; threads still running: %s", reason, EXIT_STILL_RUNNING, running
    )
    faulthandler.dump_traceback(file=STANDARD_ERROR, all_threads=True)
    exit_guard.end_processes(exit_guard.descendants(os.getpid()), 0.0)
    os._exit(EXIT_STILL_RUNNING)
