"""The guard process of a server, started by `process_exit.ProcessExit` as `python -I -S exit_guard.py`.

A thread that holds the interpreter lock in C code blocks every Python signal handler and every other thread of its
process. The C part of CPython's signal handling still writes the number of each signal to the descriptor of
`signal.set_wakeup_fd`. The guard process reads these numbers from its standard input, and kills the server if it does
not end in time. When the server ends, standard input reaches its end, and the guard process ends too.

This module imports only modules that load fast, and none of Chairlift, which its interpreter cannot find.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Iterable

DRAIN_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STACKS_SECONDS = 0.2
"""Seconds in which the server can write the stacks of its threads before it is killed."""

ORPHAN_SECONDS = 1.0
"""Seconds in which the child processes of the server can end by themselves after the server."""

POLL_SECONDS = 0.02
MAX_MESSAGE_BYTES = 2048
"""A size that a pipe accepts without blocking if it is reported as writable (less than PIPE_BUF)."""


class ExitDeadline:
    """The time by which a server must have ended, computed from the signals that it has received.

    Args:
        drain_seconds: Seconds from the first signal.
        forced_exit_seconds: Seconds from the second signal.
    """

    def __init__(self, drain_seconds: float, forced_exit_seconds: float) -> None:
        self.time = math.inf
        self.num_signals = 0
        self._limits = (drain_seconds, forced_exit_seconds)

    def receive(self, number: int, now: float) -> None:
        """Update the deadline after a signal. Signals other than DRAIN_SIGNALS have no effect."""
        if number not in DRAIN_SIGNALS:
            return
        if self.num_signals < len(self._limits):
            self.time = min(self.time, now + self._limits[self.num_signals])
        self.num_signals += 1


def main(server: int, drain_seconds: float, forced_exit_seconds: float) -> None:
    """Guard the process with the id `server`, which is the parent of this process."""
    for number in (*DRAIN_SIGNALS, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deadline = ExitDeadline(drain_seconds, forced_exit_seconds)
    while (seconds := deadline.time - time.monotonic()) > 0:
        readable, _, _ = select.select([0], [], [], None if math.isinf(seconds) else seconds)
        if readable:
            numbers = os.read(0, 512)
            if not numbers:
                return
            for received in numbers:
                deadline.receive(received, time.monotonic())
    _kill_server(server, deadline.num_signals)


def _kill_server(server: int, num_signals: int) -> None:
    if os.getppid() != server:
        return
    signals = "a stop signal" if num_signals == 1 else f"{num_signals} stop signals"
    write_to_stderr(
        f"ERROR the server (process {server}) received {signals} and did not end in time, because a thread holds the "
        "interpreter lock or the event loop is blocked; the guard process kills it (exit status 137). Its threads:\n"
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGUSR1)  # faulthandler writes the stacks without the interpreter lock.
    time.sleep(STACKS_SECONDS)
    children = descendants(server)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    end_processes(children, ORPHAN_SECONDS)


def descendants(pid: int) -> list[tuple[int, int]]:
    """The child processes of a process and their descendants, as (pid, start time), without the calling process.

    Returns an empty list on systems without /proc.
    """
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and (found := _parent_and_start(int(name))) is not None:
            parent, start = found
            children.setdefault(parent, []).append((int(name), start))
    result: list[tuple[int, int]] = []
    pending = [pid]
    while pending:
        for child in children.get(pending.pop(), ()):
            pending.append(child[0])
            if child[0] != os.getpid():
                result.append(child)
    return result


def end_processes(processes: Iterable[tuple[int, int]], seconds: float) -> None:
    """Wait for processes to end by themselves, and kill those that still run after `seconds`."""
    deadline = time.monotonic() + seconds
    remaining = list(processes)
    while (remaining := [process for process in remaining if _is_running(*process)]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for pid, _ in remaining:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _is_running(pid: int, start: int) -> bool:
    """Whether a process still runs. The start time distinguishes it from a later process with the same id."""
    found = _parent_and_start(pid)
    return found is not None and found[1] == start


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """The parent's pid and the start time in clock ticks since boot, from /proc/PID/stat; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else (int(fields[1]), int(fields[19]))


def write_to_stderr(text: str) -> None:
    """Write a message, unless standard error is a full pipe, which would block this process."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode()[:MAX_MESSAGE_BYTES])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
