"""Process 1 of a container: a small parent of the server.

The kernel ignores SIGKILL from inside the container for its process 1, so the guard process could not end a server that
hangs, and process 1 has to reap processes whose parents have ended.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final, NoReturn

FORWARDED: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


def fork_if_process_1() -> None:
    """In process 1, fork: the child returns; the parent forwards signals, and ends with the child's exit status. In any
    other process, do nothing. Call it before other threads are started."""
    if os.getpid() != 1:
        return
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # Ctrl-C at a terminal reaches process 1 only, which forwards it
        return
    _wait_for(child)


def _wait_for(child: int) -> NoReturn:
    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for name in FORWARDED:
        signal.signal(getattr(signal, name), forward)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
