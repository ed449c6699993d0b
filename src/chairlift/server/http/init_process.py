"""Process 1 of a container: a small parent process of the server.

In a container the kernel does not deliver SIGKILL from inside to process 1, so the guard process could not kill a
server that hangs. Process 1 must also reap processes whose parents have ended.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Final, NoReturn

FORWARDED_SIGNALS: Final = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


def fork_if_process_1() -> None:
    """Fork if this is process 1: only the child returns; the parent forwards signals and the exit status of the child.

    In any other process this does nothing. It must be called before threads are started.
    """
    if os.getpid() != 1:
        return
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # Ctrl-C at a terminal then reaches process 1 only, which forwards it.
        return
    _forward_signals_to(child)


def _forward_signals_to(child: int) -> NoReturn:
    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    for name in FORWARDED_SIGNALS:
        signal.signal(getattr(signal, name), forward)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
