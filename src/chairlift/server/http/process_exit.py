"""The end of a server's process, in bounded time whatever its threads do, and its exit status.

first signal --drain_timeout--> the drain ends --FLUSH_SECONDS--> connections are closed --> exit status 0
                                     |--ENGINE_STOP_SECONDS--> the engine is killed if it has not ended
                                     |--EXIT_SECONDS--> a thread still runs: EXIT_STILL_RUNNING
first signal ----------------drain_timeout + EXIT_SECONDS-------------> no thread can run: SIGKILL by the guard (137)
second signal --FORCED_EXIT_SECONDS--> the same two
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
from types import FrameType
from typing import Final, NoReturn

from chairlift.server.http import exit_guard

logger = logging.getLogger("chairlift")

EXIT_STILL_RUNNING: Final = 4
"""Exit status if the time was over and a thread still ran. 1 to 3 have other meanings: an unexpected error, a mistake
on the command line, and uvicorn's failure to start."""

EXIT_SECONDS: Final = 5.0
"""From the end of the drain, or of drain_timeout, until the process has ended."""

FORCED_EXIT_SECONDS: Final = 2.0
"""From a second signal until the process has ended; streams get their error event meanwhile."""

SELF_EXIT_MARGIN_SECONDS: Final = 0.8
"""How much earlier than these times the process ends itself, with a status that says more than SIGKILL."""

GUARD_MARGIN_SECONDS: Final = 0.3
"""How much earlier the guard process begins to kill it."""

MAX_GUARD_RESTARTS: Final = 3
"""A guard process that has ended more often is not started again."""

FLUSH_SECONDS: Final = 3
"""For connections to take what was written to them, once everything is answered."""

ENGINE_STOP_SECONDS: Final = 3.5
"""For the engine to finish its step and close its files, while connections take what was written to them."""

FORCED_FLUSH_SECONDS: Final = 1
FORCED_ENGINE_STOP_SECONDS: Final = 0.8
STANDARD_ERROR: Final = 2


class ProcessExit:
    """Bounds how long the process of a server takes to end. Create it in the main thread, when it begins to serve.

    Starts the guard process, which ends by itself after this one. Without one, where processes cannot be started or
    have no signals, only a thread that holds the interpreter lock can delay the end.

    Args:
        drain_timeout: seconds that calls in flight may take after the first signal.
    """

    def __init__(self, drain_timeout: float) -> None:
        self._wakeup: int | None = None
        if os.name != "posix":
            return
        faulthandler.register(signal.SIGUSR1, file=STANDARD_ERROR, all_threads=True)
        try:
            self._wakeup = GuardProcess(drain_timeout).wakeup
        except OSError as error:
            logger.warning("%s", _no_guard(error))
            return
        self.watch_signals()

    def watch_signals(self) -> None:
        """Send the numbers of signals to the guard process. An event loop that runs in the main thread installs a
        descriptor of its own when it starts, so call this once more on the loop."""
        if self._wakeup is not None and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)

    def limit(self, seconds: float) -> None:
        """End the process within `seconds` if it does not end by itself. May be called in a signal handler, so it uses
        no lock; the earliest of several limits applies."""
        _thread.start_new_thread(_end_after, (seconds - SELF_EXIT_MARGIN_SECONDS,))

    def end_at_next_signal(self) -> None:
        """Let another SIGINT or SIGTERM end the process at once; for the time after the event loop."""

        def end(_number: int, _frame: FrameType | None) -> NoReturn:
            end_process("another signal to stop was received")

        for number in exit_guard.DRAIN_SIGNALS:
            signal.signal(number, end)


class GuardProcess:
    """The guard process of this process, which is started again when it ends, at most MAX_GUARD_RESTARTS times.

    It runs in a session of its own, which a terminal's Ctrl-C does not reach. This process keeps the reading end of the
    pipe open, so that the number of a signal can also be written while no guard process runs.

    Args:
        drain_timeout: as of `ProcessExit`.

    Attributes:
        wakeup: the descriptor for `signal.set_wakeup_fd`.

    Raises:
        OSError: the machine cannot start a process now.
    """

    def __init__(self, drain_timeout: float) -> None:
        limits = [
            str(seconds - GUARD_MARGIN_SECONDS) for seconds in (drain_timeout + EXIT_SECONDS, FORCED_EXIT_SECONDS)
        ]
        self._command = [sys.executable, "-I", "-S", exit_guard.__file__, str(os.getpid()), *limits]
        self._reading, self.wakeup = os.pipe()
        os.set_blocking(self.wakeup, False)
        try:
            process = self._start()
        except OSError:
            os.close(self._reading)
            os.close(self.wakeup)
            raise
        threading.Thread(target=self._restart, args=(process,), name="guard-restart", daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=self._reading, stdout=subprocess.DEVNULL, start_new_session=True)

    def _restart(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(MAX_GUARD_RESTARTS):
            status = process.wait()
            logger.warning("the guard process %d ended (exit status %d): it is started again", process.pid, status)
            try:
                process = self._start()
            except OSError as error:
                logger.warning("%s", _no_guard(error))
                return
        process.wait()
        logger.warning("%s", _no_guard(f"{MAX_GUARD_RESTARTS + 1} have ended"))


def _no_guard(reason: object) -> str:
    return f"no guard process can be started ({reason}): a thread that hangs can delay shutdown"


def _end_after(seconds: float) -> None:
    time.sleep(seconds)
    end_process(f"the process has not ended {seconds:g} s after the server stopped answering")


def end_process(reason: str) -> NoReturn:
    """End this process and its children with EXIT_STILL_RUNNING, without waiting for its threads."""
    running = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
    logger.error("%s; it ends with exit status %d; threads still running: %s", reason, EXIT_STILL_RUNNING, running)
    faulthandler.dump_traceback(file=STANDARD_ERROR, all_threads=True)
    exit_guard.end_processes(exit_guard.descendants(os.getpid()), 0.0)
    os._exit(EXIT_STILL_RUNNING)
