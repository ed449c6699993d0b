"""`chairlift serve` ends in bounded time with the documented exit status while one of its threads hangs."""

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from chairlift.server.http.process_exit import EXIT_SECONDS, EXIT_STILL_RUNNING, FORCED_EXIT_SECONDS

STUCK_SERVER = Path(__file__).with_name("stuck_server.py")
OPTIONS = ["--port", "0", "--skip-tokenizer-init", "--num-kv-blocks", "60", "--max-num-seqs", "8"]
DRAIN_TIMEOUT = 1.0
LONG_DRAIN_TIMEOUT = 60.0
SLACK_SECONDS = 2.0
"""For a machine that runs other tests meanwhile."""

KILLED_BY_GUARD = -signal.SIGKILL
STATUSES = {
    "c-with-lock": KILLED_BY_GUARD,
    "c-without-lock": EXIT_STILL_RUNNING,
    "python": EXIT_STILL_RUNNING,
    "regex": KILLED_BY_GUARD,
    "executor": EXIT_STILL_RUNNING,
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass(slots=True)
class StuckServer:
    """A server of `stuck_server.py`, and the lines that it has written to standard error."""

    process: subprocess.Popen[str]
    stderr_lines: list[str]
    port: int = 0

    def wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
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
    server = StuckServer(process, [])
    stderr = process.stderr
    assert stderr is not None
    threading.Thread(target=lambda: server.stderr_lines.extend(stderr), daemon=True).start()
    try:
        server.port = int(server.wait_for(r"ready in \S+ s").split("/v1 ")[0].rpartition(":")[2])
        yield server
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a server: seconds since the last signal, and `orphans`, child processes that still run."""

    status: int
    seconds: float
    orphans: list[psutil.Process]
    stderr: str


def stop(model: Path, folder: Path, place: str, num_signals: int) -> Outcome:
    with stuck_server(model, folder, DRAIN_TIMEOUT if num_signals == 1 else LONG_DRAIN_TIMEOUT) as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) == 2, "the guard process and the engine"
        if place in ("c-with-lock", "executor"):
            (engine,) = (child for child in children if any("engine" in word for word in child.cmdline()))
            engine.suspend()  # an engine that hangs, too, and does not see that the server has ended
        server.hang(place)
        for _ in range(num_signals):
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            signalled = time.monotonic()
        status = server.process.wait(timeout=30)
        seconds = time.monotonic() - signalled
        _, orphans = psutil.wait_procs(children, timeout=3)
        return Outcome(status, seconds, orphans, "".join(server.stderr_lines))


@pytest.fixture(scope="module")
def outcomes(
    tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Outcome]:
    """The outcomes of all servers, by the place where they hang and the number of signals."""
    model, folder = tiny_model_dir("llama"), tmp_path_factory.mktemp("shutdown")
    cases = [(place, num_signals) for num_signals in (1, 2) for place in STATUSES]
    with ThreadPoolExecutor(len(STATUSES)) as pool:
        return dict(zip(cases, pool.map(lambda case: stop(model, folder, *case), cases), strict=True))


Outcomes = dict[tuple[str, int], Outcome]


@pytest.mark.parametrize("place", STATUSES)
def test_one_signal_ends_a_server_with_a_hanging_thread(outcomes: Outcomes, place: str) -> None:
    outcome = outcomes[place, 1]
    assert outcome.status == STATUSES[place], outcome.stderr
    assert outcome.seconds < DRAIN_TIMEOUT + EXIT_SECONDS + SLACK_SECONDS
    assert not outcome.orphans


@pytest.mark.parametrize("place", STATUSES)
def test_a_second_signal_ends_it_at_once(outcomes: Outcomes, place: str) -> None:
    outcome = outcomes[place, 2]
    assert outcome.status == STATUSES[place], outcome.stderr
    assert outcome.seconds < FORCED_EXIT_SECONDS + SLACK_SECONDS
    assert not outcome.orphans


@pytest.mark.parametrize("place", STATUSES)
def test_log_names_the_hanging_thread(outcomes: Outcomes, place: str) -> None:
    for num_signals in (1, 2):
        stderr = outcomes[place, num_signals].stderr
        assert "in hang_in" in stderr, "the stacks of all threads"
        assert "stuck_server.py" in stderr
        if STATUSES[place] == EXIT_STILL_RUNNING:
            assert re.search(r"exit status 4; threads still running: .*(hanging-|uvloop_0)", stderr)
        else:
            assert "the guard process kills it (exit status 137)" in stderr


UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def can_unshare() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_unshare(), reason="needs the right to create a process namespace")
def test_process_1_of_a_container_ends_although_it_ignores_sigkill(
    tiny_model_dir: Callable[..., Path], tmp_path: Path
) -> None:
    with stuck_server(tiny_model_dir("llama"), tmp_path, 0.0, *UNSHARE) as server:
        (process_1,) = psutil.Process(server.process.pid).children()
        everything = process_1.children(recursive=True)
        assert len(everything) == 3, "the server, the guard process and the engine"
        server.hang("c-with-lock")
        process_1.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=30) == 128 + signal.SIGKILL
        _, orphans = psutil.wait_procs(everything, timeout=3)
        assert not orphans
        assert "the guard process kills it" in "".join(server.stderr_lines)
