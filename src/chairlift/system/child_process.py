"""A supervised child process: its start, frames to and from it, deadlines for replies, and its end.

Requests and replies are frames: the length of the content in 8 bytes, and the content.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import IO, Any, Final

HEADER: Final = struct.Struct("<Q")
START_SECONDS: Final = 60.0
"""Maximum seconds to start a process and import its modules."""


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


class ChildProcess:
    """A process that reads its requests with `read_frame`.

    Only one thread at a time may exchange frames with it. After an error of `exchange` the caller must close it.

    Args:
        command: the program and its arguments, such as `python_command` returns.
        options: further arguments of `subprocess.Popen`. With `stdout=None` the process writes no replies.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._command = command
        self._options = {"stdout": subprocess.PIPE, **options}
        self._process: subprocess.Popen[bytes] | None = None
        self._parent: int | None = None
        self._is_killed = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process; None if none has been started."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs and has not been killed. In a fork of the parent process it counts as ended."""
        process = self._process
        return process is not None and not self._is_killed and process.poll() is None

    def start(self, ready_seconds: float | None = None) -> None:
        """Start the process, instead of the previous one if there is one.

        Args:
            ready_seconds: maximum seconds until the process reports with a frame that it is ready; None if it does not.

        Raises:
            TimeoutError, EOFError: as for `exchange`.
        """
        self.close()
        self._is_killed = False
        self._parent = os.getpid()
        process = subprocess.Popen(self._command, stdin=subprocess.PIPE, **self._options)
        with self._lock:
            self._process = process
        if self._is_killed:  # By a call of `kill` that came before this process could be found.
            self.kill()
        if ready_seconds is not None:
            self._read_reply(process, (), ready_seconds)

    def send(self, request: bytes) -> None:
        """Send a frame that has no reply. Nothing happens if the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            write_frame(self._process.stdin, request)

    def exchange(self, *requests: bytes, seconds: float) -> bytes:
        """Send frames and return the reply.

        Raises:
            TimeoutError: there was no reply within `seconds`. The process has been killed.
            EOFError: the process has ended, or another thread has closed it.
        """
        process = self._process
        if process is None:
            raise EOFError
        return self._read_reply(process, requests, seconds)

    def _read_reply(self, process: subprocess.Popen[bytes], requests: Iterable[bytes], seconds: float) -> bytes:
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds

        def kill_late_process() -> None:
            with self._lock:  # A timer that expires when the reply arrives must not kill the process afterwards.
                if not killer.finished.is_set():
                    self.kill()

        killer = threading.Timer(seconds, kill_late_process)
        killer.daemon = True
        killer.start()
        reply = None
        try:
            with contextlib.suppress(OSError, ValueError):  # A pipe is broken, or another thread has closed it.
                for request in requests:
                    write_frame(process.stdin, request)
                reply = read_frame(process.stdout)
        finally:
            with self._lock:
                killer.cancel()
            if reply is None:  # Also after an interrupt: the next request must not get the reply to this one.
                self.kill()
        if reply is None:
            raise TimeoutError if time.monotonic() >= deadline else EOFError
        return reply

    def kill(self) -> None:
        """Kill the process, and its process group if it leads one. A waiting `exchange` raises EOFError.

        A process that another thread is starting is killed when it has started. A fork of the parent process kills
        nothing.
        """
        self._is_killed = True
        process = self._process
        # The process is not polled, because its id also identifies its group until it has been reaped.
        if process is None or process.returncode is not None or self._parent != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            is_leader = self._options.get("start_new_session") or self._options.get("process_group") == 0
            if is_leader:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the exit of the process. Return its status, or minus a signal; None after `seconds` or `close`."""
        process = self._process
        try:
            return None if process is None else process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Kill the process if it runs, and wait until it has ended."""
        with self._lock:
            self.kill()
            process, self._process = self._process, None
        if process is None:
            return
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The content of the next frame of a buffered file; None at its end."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    content = file.read(length)
    return content if len(content) == length else None


def write_frame(file: IO[bytes], content: bytes) -> None:
    """Write a frame."""
    file.write(HEADER.pack(len(content)))
    file.write(content)
    file.flush()


def ignore_shared_signals() -> None:
    """Ignore the signals that terminals and service managers send to all processes of a server. The first of these
    processes handles them, and ends this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process, and write no core dumps, on systems that support these limits."""
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
