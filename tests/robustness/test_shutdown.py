"""`chairlift serve` ends in bounded time, and its engine with it, while one of its threads hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from support.waiting import AMPLE_SECONDS

STUCK_SERVER = Path(__file__).with_name("stuck_server.py")
OPTIONS = ["--port", "0", "--skip-tokenizer-init", "--num-kv-blocks", "60", "--max-num-seqs", "8"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass(slots=True)
class StuckServer:
    """A server of `stuck_server.py`, and the lines that it has written to standard error."""

    process: subprocess.Popen[str]
    stderr_lines: list[str] = field(default_factory=list)
    port: int = 0
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stderr is not None
        self.reader = threading.Thread(target=self.stderr_lines.extend, args=(self.process.stderr,), daemon=True)
        self.reader.start()

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + AMPLE_SECONDS
        while not (found := [line for line in self.stderr_lines if re.search(pattern, line)]):
            assert self.process.poll() is None, "".join(self.stderr_lines)
            assert time.monotonic() < deadline, "".join(self.stderr_lines)
            time.sleep(0.01)
        return found[0]

    def hang(self, place: str) -> None:
        """Call the endpoint that hangs, which may never answer."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        with contextlib.closing(connection):
            connection.sendall(f"GET /hang/{place} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            self.wait_for(f"hangs in {place}")


@contextlib.contextmanager
def stuck_server(model: Path, folder: Path, drain_timeout: float, *prefix: str) -> Iterator[StuckServer]:
    """Run a server with `folder` for temporary files, through the command `prefix` if there is one."""
    command = [sys.executable, str(STUCK_SERVER), "serve", str(model), *OPTIONS, "--drain-timeout", str(drain_timeout)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen([*prefix, *command], stderr=subprocess.PIPE, text=True, env=environment)
    server = StuckServer(process)
    try:
        server.port = int(server.wait_for(r"ready in \S+ s").split("/v1 ")[0].rpartition(":")[2])
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("places", "num_signals"), [(("c-without-lock", "python"), 1), (("executor",), 2)])
def test_a_server_ends_although_threads_hang(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, places: tuple[str, ...], num_signals: int
) -> None:
    with stuck_server(tiny_model_dir("llama"), tmp_path, 1.0 if num_signals == 1 else 600.0) as server:
        (engine,) = psutil.Process(server.process.pid).children(recursive=True)
        for place in places:
            server.hang(place)
        for number in (signal.SIGTERM, signal.SIGQUIT)[:num_signals]:
            server.process.send_signal(number)
            server.wait_for("shutting down")  # The second signal must not arrive together with the first one.
        assert server.process.wait(AMPLE_SECONDS) == 1
        engine.wait(AMPLE_SECONDS)
        server.reader.join()
        stderr = "".join(server.stderr_lines)
        assert stderr.count("in hang_in") == len(places), "the stacks of all threads"
        assert "stuck_server.py" in stderr


def test_the_watchdog_ends_a_process_whose_interpreter_is_locked() -> None:
    code = """
import ctypes
from chairlift.server.draining_server import end_process_after
end_process_after(600)
end_process_after(0.1)
ctypes.PyDLL(None).sleep(600)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=AMPLE_SECONDS, check=False
    )
    assert ended.returncode == 1
    assert "most recent call first" in ended.stderr


UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def can_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_unshare(), reason="needs the right to create a process namespace")
def test_process_1_of_a_container_ends_after_sigterm(tiny_model_dir: Callable[..., Path], tmp_path: Path) -> None:
    with stuck_server(tiny_model_dir("llama"), tmp_path, 1.0, *UNSHARE) as server:
        (process_1,) = psutil.Process(server.process.pid).children()
        (engine,) = process_1.children(recursive=True)
        process_1.send_signal(signal.SIGTERM)
        assert server.process.wait(AMPLE_SECONDS) == 0
        engine.wait(AMPLE_SECONDS)
