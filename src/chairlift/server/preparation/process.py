"""The parent's end of a preparation worker: starts it, sends it bodies, ends it when it takes too long."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Any, Final

from chairlift.engine.wire import EngineFacts
from chairlift.server.api.api_options import ApiOptions

FRAME: Final = struct.Struct("<Q")
"""The length of a frame, which precedes it."""

MAX_MEMORY: Final = 512 << 20
"""Bytes. A worker that holds more after a body is ended, which returns its memory."""

START_SECONDS: Final = 60.0
"""Time that a worker may take to load the tokenizer, in addition to the time for its first body."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """What a worker needs to make plans.

    Attributes:
        model: as `EngineConfig.model`; the tokenizer is loaded from its files.
        skip_tokenizer_init: as `EngineConfig.skip_tokenizer_init`.
        facts: what the engine reported when it was ready.
        max_json_depth: as `ServerLimits.max_json_depth`.
    """

    model: str | None
    skip_tokenizer_init: bool
    facts: EngineFacts
    api: ApiOptions
    max_json_depth: int


@dataclass(frozen=True, slots=True)
class Rejection:
    """The body is wrong, or asks for something that cannot be honoured."""

    message: str
    param: str | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A valid body without its large fields, and its plan."""

    body: Any
    plan: Any


@dataclass(frozen=True, slots=True)
class Reply:
    """What a worker made of a body.

    Attributes:
        cpu_seconds: CPU time of the worker for it.
        memory: bytes that the worker holds after it.
    """

    outcome: Prepared | Rejection
    cpu_seconds: float
    memory: int


def write_frame(file: IO[bytes], content: bytes) -> None:
    """Write a frame; it can be read by `read_frame`."""
    file.write(FRAME.pack(len(content)))
    file.write(content)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """The next frame of a buffered file; None at its end."""
    header = file.read(FRAME.size)
    return file.read(FRAME.unpack(header)[0]) if len(header) == FRAME.size else None


class PreparationProcess:
    """A worker process, started for the first body and again after it has ended. For one thread at a time; `kill` is
    for any thread.

    Frames are pickled: both ends run this program, and what a request holds is data inside of them.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        """The id of the process, if one is running."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        process = self._process
        return process is not None and process.poll() is None

    def run(self, endpoint: str, body: bytes, seconds: float) -> Reply:
        """Prepare a body for an endpoint, which is an attribute of `EndpointPlanners`.

        Raises:
            TimeoutError: the worker gave no reply within `seconds`, and was ended.
            EOFError: the worker ended without a reply.
        """
        process, allowed = self._process, seconds
        if process is None or not self.is_running:
            process, allowed = self._start(), seconds + START_SECONDS
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + allowed
        try:
            write_frame(process.stdin, pickle.dumps((endpoint, body)))
            reply = pickle.loads(_receive(process.stdout.fileno(), deadline))
        except TimeoutError:
            self.close()
            raise
        except OSError:
            self.close()
            raise EOFError from None
        except EOFError:
            self.close()
            raise
        assert isinstance(reply, Reply)
        if reply.memory > MAX_MEMORY:
            self.close()
        return reply

    def kill(self) -> None:
        """End the process at once; `run` in another thread then raises EOFError."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the process, if one is running, and wait until it has ended."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
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
            start_new_session=True,  # Ctrl-C at a terminal is for the server, which ends its workers
        )
        self._process = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            write_frame(process.stdin, pickle.dumps(self._setup))
        return process


def _receive(descriptor: int, deadline: float) -> bytes:
    """A frame from a pipe, read as it arrives, so that the deadline holds for all of it."""
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
