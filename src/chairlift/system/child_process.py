"""A child process that answers one request at a time and is killed if it does not answer in time.

Requests and replies are frames: the length of the content in 8 bytes, and the content.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any, Final

from chairlift.system.cpu_account import charge_process

HEADER: Final = struct.Struct("<Q")
START_SECONDS: Final = 60.0
"""Maximum seconds to start a process and import its modules."""


class ChildProcess:
    """A process that runs a Python module, which must read its requests with `read_frames`.

    Only one thread at a time may use it, except for `kill`. After an error the caller must close it.

    Args:
        module: The name of the module.
        arguments: The command-line arguments of the module.
        options: Further arguments of `subprocess.Popen`.
    """

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
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

    def start(self) -> None:
        """Start the process, instead of the previous one if there is one."""
        self.close()
        self._is_killed = False
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **self._options)
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def exchange(self, request: bytes, deadline: float) -> bytes:
        """Send a request and return its reply. The CPU time is charged to the account of the calling thread.

        Args:
            deadline: The time on `time.monotonic` until which the reply must have arrived.

        Raises:
            TimeoutError: There is no reply at the deadline.
            EOFError: The process has ended.
        """
        assert self._process is not None
        with charge_process(self._process.pid):
            self.send(request, deadline)
            return self.receive(deadline)

    def send(self, content: bytes, deadline: float) -> None:
        """Write a frame. It raises the errors of `exchange`."""
        assert self._process is not None
        assert self._process.stdin is not None
        descriptor = self._process.stdin.fileno()
        left = memoryview(HEADER.pack(len(content)) + content)
        while left:
            _wait_for(descriptor, select.POLLOUT, deadline)
            try:
                left = left[os.write(descriptor, left[: 1 << 20]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError from None

    def receive(self, deadline: float) -> bytes:
        """Read a frame. It raises the errors of `exchange`."""
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        received, length = bytearray(), HEADER.size
        while len(received) < length:
            _wait_for(descriptor, select.POLLIN, deadline)
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise EOFError
            received += chunk
            if length == HEADER.size and len(received) >= HEADER.size:
                length += HEADER.unpack_from(received)[0]
        return bytes(memoryview(received)[HEADER.size :])

    def kill(self) -> None:
        """Kill the process, and its child processes if it leads a session. A waiting `exchange` raises EOFError."""
        process = self._process
        if process is not None and process.returncode is None:
            self._is_killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if self._options.get("start_new_session"):
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()

    def close(self) -> None:
        """Kill the process if it runs, and wait until it has ended."""
        with self._lock:
            self.kill()
            process, self._process = self._process, None
        if process is None:
            return
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


def _wait_for(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # `select.select` supports no descriptor beyond 1023.
    poll.register(descriptor, event)
    if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
        raise TimeoutError


def read_frames(file: IO[bytes]) -> Iterator[bytes]:
    """The contents of the frames of a buffered file, until its end."""
    while len(header := file.read(HEADER.size)) == HEADER.size:
        yield file.read(HEADER.unpack(header)[0])


def write_frame(file: IO[bytes], content: bytes) -> None:
    """Write a frame."""
    file.write(HEADER.pack(len(content)))
    file.write(content)
    file.flush()


def limit_memory(num_bytes: int) -> None:
    """Limit the address space of this process, and write no core dumps, on systems that support these limits."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
