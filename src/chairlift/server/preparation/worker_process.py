"""The server's side of a preparation worker: starts the process, sends bodies to it, and kills it after a timeout."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import psutil

from chairlift.engine.process.wire import EngineFacts
from chairlift.loading.resolve import ModelFiles
from chairlift.server.api.api_options import ApiOptions
from chairlift.system.cpu_account import process_cpu_seconds

FRAME: Final = struct.Struct("<Q")
"""The header of a frame: the length of its content in bytes."""

MAX_MEMORY: Final = 512 << 20
"""A worker that uses more bytes of memory after a body is ended, which frees its memory."""

START_SECONDS: Final = 60.0
"""Maximum seconds to start a worker and load the tokenizer, in addition to the time for its first body."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The data with which a worker creates its planners.

    Attributes:
        model: As `EngineConfig.model`. The tokenizer is loaded from its files.
        skip_tokenizer_init: As `EngineConfig.skip_tokenizer_init`.
        facts: The description of the engine, as the engine reported it when it was ready.
        api: The options of the API.
        max_json_depth: As `ServerLimits.max_json_depth`.
        fingerprint: `tokenizer_fingerprint` of the model's files when the server loaded them. A worker that finds
            other files fails, because it might tokenize differently from the server.
    """

    model: str | None
    skip_tokenizer_init: bool
    facts: EngineFacts
    api: ApiOptions
    max_json_depth: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Rejection:
    """The message of a 400, and the field that it names: the body is invalid or exceeds a limit."""

    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The message of a 503: the worker failed for a reason that is not in the body."""

    message: str


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A valid body without its `content_fields`, and its plan."""

    body: Any
    plan: Any


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """The reply of a worker to one body.

    Attributes:
        outcome: The prepared request, or the reason why there is none.
        cpu_seconds: CPU time of the worker and its template process for the body.
        memory: Resident memory of the worker after the body, in bytes.
    """

    outcome: PreparedRequest | Rejection | WorkerFailure
    cpu_seconds: float
    memory: int


def tokenizer_fingerprint(files: ModelFiles) -> str:
    """A string that identifies the files of a tokenizer by their names, sizes and modification times."""
    path = files.path
    folder = path if path.is_dir() else path.parent
    if files.kind == "gguf":
        found = [path]
    else:
        found = sorted(file for pattern in ("*.json", "*.jinja") for file in folder.glob(pattern))
    stats = [(file.name, file.stat()) for file in found]
    return ";".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in stats)


def write_frame(file: IO[bytes], content: bytes) -> None:
    """Write a frame that `read_frame` can read."""
    file.write(FRAME.pack(len(content)))
    file.write(content)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Read the next frame of a buffered file; return None at its end."""
    header = file.read(FRAME.size)
    return file.read(FRAME.unpack(header)[0]) if len(header) == FRAME.size else None


class WorkerEndedError(Exception):
    """A worker ended without a reply, or could not be started.

    Attributes:
        is_timeout: Whether the worker was killed because it exceeded its time.
        cpu_seconds: CPU time that the worker used for the body.
    """

    def __init__(self, message: str, *, is_timeout: bool = False, cpu_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.is_timeout = is_timeout
        self.cpu_seconds = cpu_seconds


class PreparationProcess:
    """A worker process, which is started for the first body, and started again after it has ended.

    Only one thread at a time may use it, except for `kill`. The contents of frames are pickled, which is safe because
    both processes run this program, and request bodies are bytes inside of the pickles.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._cpu_seconds_before = 0.0
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process; None if none has been started."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def run(self, endpoint: str, body: bytes, seconds: float) -> WorkerReply:
        """Prepare a body.

        Args:
            endpoint: The path of the endpoint.
            seconds: The timeout.

        Raises:
            WorkerEndedError: There was no reply within `seconds`, or the worker ended.
        """
        try:
            return self._run(endpoint, body, seconds)
        except TimeoutError:
            error = WorkerEndedError(f"the timeout of {seconds:g} s has passed", is_timeout=True)
        except EOFError:
            error = WorkerEndedError("the worker process ended")
        except Exception as cause:
            error = WorkerEndedError(f"the worker process failed ({cause})")
        error.cpu_seconds = self.cpu_seconds()
        self.close()
        raise error from None

    def _run(self, endpoint: str, body: bytes, seconds: float) -> WorkerReply:
        process, allowed = self._process, seconds
        if process is None or not self.is_running:
            process, allowed = self._start(), seconds + START_SECONDS
        assert process.stdin is not None
        assert process.stdout is not None
        self._cpu_seconds_before = self._total_cpu_seconds()
        deadline = time.monotonic() + allowed
        _send(process.stdin.fileno(), pickle.dumps((endpoint, body)), deadline)
        reply = pickle.loads(_receive(process.stdout.fileno(), deadline))
        assert isinstance(reply, WorkerReply)
        if isinstance(reply.outcome, WorkerFailure) or reply.memory > MAX_MEMORY:
            self.close()
        return reply

    def cpu_seconds(self) -> float:
        """Seconds of CPU time of the worker and its template process since the last body was sent."""
        return max(0.0, self._total_cpu_seconds() - self._cpu_seconds_before)

    def _total_cpu_seconds(self) -> float:
        process = self._process
        if process is None:
            return 0.0
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(process.pid).cpu_times()
            ended_children = times.children_user + times.children_system
            return float(times.user + times.system + ended_children) + sum(map(process_cpu_seconds, _children(process)))
        return 0.0

    def kill(self) -> None:
        """Kill the process. A call of `run` in another thread then raises WorkerEndedError."""
        process = self._process
        if process is not None:
            _kill_group(process)

    def close(self) -> None:
        """Kill the process if one is running, and wait until it has ended."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        _kill_group(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self.close()
        process = subprocess.Popen(
            [sys.executable, "-m", "chairlift.server.preparation.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C at a terminal must reach only the server, which ends its workers.
        )
        self._process = process
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        _send(process.stdin.fileno(), pickle.dumps(self._setup), time.monotonic() + START_SECONDS)
        return process


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session of its own, and its child processes."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    """The child processes that the main thread of a process has started; empty on systems without /proc."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    return []


def _send(descriptor: int, content: bytes, deadline: float) -> None:
    """Write a frame to a non-blocking pipe. Raise TimeoutError at the deadline, and EOFError if the pipe is closed."""
    left = memoryview(FRAME.pack(len(content)) + content)
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    while left:
        if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        try:
            left = left[os.write(descriptor, left[: 1 << 20]) :]
        except BlockingIOError:
            continue
        except BrokenPipeError:
            raise EOFError from None


def _receive(descriptor: int, deadline: float) -> bytes:
    """Read a frame from a pipe. Raise TimeoutError at the deadline, and EOFError if the pipe is closed."""
    received = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    length = FRAME.size
    while len(received) < length:
        if not poll.poll(1e3 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        chunk = os.read(descriptor, 1 << 20)
        if not chunk:
            raise EOFError
        received += chunk
        if length == FRAME.size and len(received) >= FRAME.size:
            length += FRAME.unpack_from(received)[0]
    return bytes(memoryview(received)[FRAME.size :])
