"""The end of a server's process, in bounded time whatever its threads do, and its exit status.

first signal --drain_timeout--> the drain ends --FLUSH_SECONDS--> connections are closed --> exit status 0
                                     |--ENGINE_SECONDS--> the engine is killed if it has not ended
                                     |--END_SECONDS--> a thread still runs: EXIT_STILL_RUNNING
first signal ----------------drain_timeout + END_SECONDS-------------> no thread can run: SIGKILL by the guard (137)
second signal --AT_ONCE_SECONDS--> the same two
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

END_SECONDS: Final = 5.0
"""From the end of the drain, or of drain_timeout, until the process has ended."""

AT_ONCE_SECONDS: Final = 2.0
"""From a second signal until the process has ended; streams get their error event meanwhile."""

OWN_MARGIN_SECONDS: Final = 0.8
"""How much earlier than these times the process ends itself, with a status that says more than SIGKILL."""

GUARD_MARGIN_SECONDS: Final = 0.3
"""How much earlier the guard process begins to kill it."""

FLUSH_SECONDS: Final = 3
"""For connections to take what was written to them, once everything is answered."""

ENGINE_SECONDS: Final = 3.5
"""For the engine to finish its step and close its files, while connections take what was written to them."""

AT_ONCE_FLUSH_SECONDS: Final = 1
AT_ONCE_ENGINE_SECONDS: Final = 0.8
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
            self._guard, self._wakeup = start_guard(drain_timeout)
        except OSError as error:
            logger.warning("no guard process can be started (%s): a thread that hangs can delay shutdown", error)
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
        _thread.start_new_thread(_end_after, (seconds - OWN_MARGIN_SECONDS,))

    def end_at_next_signal(self) -> None:
        """Let another SIGINT or SIGTERM end the process at once; for the time after the event loop."""

        def end(_number: int, _frame: FrameType | None) -> NoReturn:
            end_process("another signal to stop was received")

        for number in exit_guard.DRAIN_SIGNALS:
            signal.signal(number, end)


def start_guard(drain_timeout: float) -> tuple[subprocess.Popen[bytes], int]:
    """Start the guard process, in a session of its own, which a terminal's Ctrl-C does not reach.

    Returns:
        the process, and the descriptor for `signal.set_wakeup_fd`.

    Raises:
        OSError: the machine cannot start a process now.
    """
    reading, writing = os.pipe()
    limits = [str(seconds - GUARD_MARGIN_SECONDS) for seconds in (drain_timeout + END_SECONDS, AT_ONCE_SECONDS)]
    command = [sys.executable, "-I", "-S", exit_guard.__file__, str(os.getpid()), *limits]
    try:
        guard = subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True)
    except OSError:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    os.set_blocking(writing, False)
    return guard, writing


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
