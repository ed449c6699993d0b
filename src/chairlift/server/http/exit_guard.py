"""The guard process of a server, started by `process_exit.GuardProcess` as `python -I -S exit_guard.py`.

A thread that holds the interpreter lock in C stops every Python signal handler and every other thread of its process.
The C part of CPython's signal handling still writes the number of each signal to the descriptor of
`signal.set_wakeup_fd`. The guard reads these numbers from its standard input, and kills the server if it does not end
in time. Standard input reaches its end when the server ends; then the guard ends too.

Only modules that import fast are imported here, and nothing of Chairlift, which this interpreter cannot find.
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
"""Time for the server to write the stacks of its threads before it is killed."""

ORPHAN_SECONDS = 1.0
"""Time for the server's child processes to end by themselves after it."""

POLL_SECONDS = 0.02
MAX_MESSAGE_BYTES = 2048
"""Less than a pipe that is reported as writable accepts without blocking (PIPE_BUF)."""


class ExitDeadline:
    """The time at which a server must have ended, from the signals that it has received.

    Args:
        drain_seconds: from the first signal.
        forced_exit_seconds: from the second signal.
    """

    def __init__(self, drain_seconds: float, forced_exit_seconds: float) -> None:
        self.time = math.inf
        self.num_signals = 0
        self._limits = (drain_seconds, forced_exit_seconds)

    def receive(self, number: int, now: float) -> None:
        """Take account of a signal; signals other than DRAIN_SIGNALS have no effect."""
        if number not in DRAIN_SIGNALS:
            return
        if self.num_signals < len(self._limits):
            self.time = min(self.time, now + self._limits[self.num_signals])
        self.num_signals += 1


def main(server: int, drain_seconds: float, forced_exit_seconds: float) -> None:
    """Guard the process `server`, the parent of this one."""
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
    signals = "a signal to stop" if num_signals == 1 else f"{num_signals} signals to stop"
    write_to_stderr(
        f"ERROR the server (process {server}) got {signals} and did not end in time, because a thread holds the "
        "interpreter lock or the event loop is blocked; the guard process kills it (exit status 137). Its threads:\n"
    )
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGUSR1)  # faulthandler writes the stacks, without the interpreter lock
    time.sleep(STACKS_SECONDS)
    children = descendants(server)
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    end_processes(children, ORPHAN_SECONDS)


def descendants(pid: int) -> list[tuple[int, int]]:
    """The child processes of a process and their children, as (pid, start time), without the calling process. Empty
    where there is no /proc."""
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
    """Whether this process, and not a later one with its number, exists."""
    found = _parent_and_start(pid)
    return found is not None and found[1] == start


def _parent_and_start(pid: int) -> tuple[int, int] | None:
    """The parent's pid and the start time (clock ticks since boot), from /proc/PID/stat (proc(5)); None if the process
    has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" else (int(fields[1]), int(fields[19]))


def write_to_stderr(text: str) -> None:
    """Write a message, unless standard error is a pipe that is full: its reader may be what hangs."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode()[:MAX_MESSAGE_BYTES])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
