"""`chairlift serve --replicas`: the start on a machine of a cluster, and how the server and its Ray end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from benchmarks.ray_cluster import read_settings

from chairlift.cluster.local_cluster import describe_ray_error
from running_server import completion_body, wait_for
from tiny_engine import tiny_options

pytest.importorskip("ray")

START_SECONDS = 120.0
MARK = "CHAIRLIFT_TEST_SERVER"
"""A variable in the environment of all processes of a server."""


@dataclass
class ReplicatedServer:
    """A `chairlift serve --replicas` in a process group of its own, like a command in a shell."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def read(self) -> None:
        """Collect the lines of standard error."""
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.text()
            for line in list(self.lines):
                if "ready in" in line:
                    self.url = line.split("ready in")[1].split()[2]
            return bool(self.url)

        wait_for(is_ready, START_SECONDS)

    def text(self) -> str:
        return "".join(self.lines)

    def send_signal_to_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """All processes of the server and of its Ray."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReplicatedServer]:
    """A server with one replica, on a machine whose environment has the settings of a cluster with HAProxy."""
    options = tiny_options(tmp_path)
    command = [
        sys.executable, "-m", "chairlift", "serve", str(options["model"]), "--load-format", "dummy", "--replicas", "1",
        "--port", "0", "--num-threads", "1", "--num-kv-blocks", "64",
    ]  # fmt: skip
    environment = {**os.environ, **read_settings(), MARK: str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, process_group=0)
    found = ReplicatedServer(process, str(tmp_path))
    threading.Thread(target=found.read, daemon=True).start()
    try:
        found.wait_until_ready()
        yield found
    finally:
        for each in found.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(30)


def test_a_signal_to_the_process_group_lets_a_stream_finish(server: ReplicatedServer) -> None:
    """Ray's processes are not in the group, so that the replica answers until the server has drained."""
    in_group = [each.name() for each in server.processes() if os.getpgid(each.pid) == server.process.pid]
    assert not {"gcs_server", "raylet"} & set(in_group), in_group
    assert {"gcs_server", "raylet"} <= {each.name() for each in server.processes()}
    body = {**completion_body(400), "stream": True}
    with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        server.send_signal_to_group(signal.SIGTERM)
        received = list(lines)
    assert "data: [DONE]" in received, received[-3:]
    assert any('"finish_reason":"length"' in line for line in received)
    assert server.process.wait(60) == 0, server.text()
    wait_for(lambda: not server.processes(), 10)
    assert "Thread 0x" not in server.text()
    assert "Token authentication" not in server.text()
    assert "\x1b[" not in server.text()


def test_a_second_signal_ends_the_server_and_ray_at_once(server: ReplicatedServer) -> None:
    with httpx.stream("POST", f"{server.url}/completions", json={**completion_body(500), "stream": True}) as response:
        next(response.iter_lines())
        server.send_signal_to_group(signal.SIGINT)
        wait_for(lambda: "shutting down" in server.text())
        started = time.monotonic()
        server.send_signal_to_group(signal.SIGINT)
        assert server.process.wait(30) == 0, server.text()
        assert time.monotonic() - started < 10
    wait_for(lambda: not server.processes(), 10)
    assert "Thread 0x" not in server.text()


def test_an_error_of_ray_is_one_line_that_names_the_token() -> None:
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    assert describe_ray_error(error) == str(error)
    error.__cause__ = RuntimeError("Traceback (most recent call last):\n  ...\nRPC error: InvalidAuthToken: ...\n")
    assert "~/.ray/auth_token" in describe_ray_error(error)
    assert describe_ray_error(RuntimeError("Deploying failed:\nTraceback\n  File ...\nValueError: x\n")) == (
        "Deploying failed: ValueError: x"
    )


def test_servers_that_start_at_the_same_moment_use_one_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve
    from ray.exceptions import ActorAlreadyExistsError

    from chairlift.cluster import local_cluster

    outcomes = [ActorAlreadyExistsError("SERVE_CONTROLLER_ACTOR"), None]

    def start(**_options: object) -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(local_cluster, "SERVE_RETRY_SECONDS", 0.0)
    local_cluster.start_serve()
    assert outcomes == []
