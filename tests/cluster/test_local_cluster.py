"""`chairlift serve --replicas`: the start on a machine of a cluster, and how the server and its Ray end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from chairlift.cluster.cluster_options import ClusterOptions
from chairlift.cluster.local_cluster import LocalCluster, describe_ray_error, end_process
from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from support.ray_settings import read_settings
from support.running_server import completion_body
from support.tiny_engine import tiny_options
from support.waiting import AMPLE_SECONDS, wait_for

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray")

START_SECONDS = 240.0
MARK = "SERVER_OF_A_TEST"
"""A variable in the environment of all processes of a server."""


@dataclass
class ReplicatedServer:
    """A `chairlift serve --replicas` in a process group of its own, like a command in a shell."""

    process: subprocess.Popen[str]
    mark: str
    lines: list[str] = field(default_factory=list)
    url: str = ""
    reader: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stderr is not None
        self.reader = threading.Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True)
        self.reader.start()

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
        return processes_with(self.mark)


def processes_with(mark: str) -> list[psutil.Process]:
    """The processes whose environment has this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def marked_process(command: list[str], mark: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process whose environment has a mark and the settings of a cluster with HAProxy; it ends with its children."""
    environment = {**os.environ, **read_settings(), MARK: mark}
    environment.pop("RAY_ADDRESS", None)
    process = subprocess.Popen(command, text=True, env=environment, **options)
    try:
        yield process
    finally:
        for each in processes_with(mark):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(AMPLE_SECONDS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReplicatedServer]:
    """A server with one replica."""
    options = tiny_options(tmp_path)
    command = [
        sys.executable, "-m", "chairlift", "serve", str(options["model"]), "--load-format", "dummy", "--replicas", "1",
        "--port", "0", "--num-threads", "1", "--num-kv-blocks", "64", "--allow-other-users",
    ]  # fmt: skip
    with marked_process(command, str(tmp_path), stderr=subprocess.PIPE, process_group=0) as process:
        found = ReplicatedServer(process, str(tmp_path))
        found.wait_until_ready()
        yield found


def test_signals_to_the_process_group_let_a_stream_finish_and_then_end_the_server_and_ray(
    server: ReplicatedServer,
) -> None:
    """Ray's processes are not in the group, so that the replica answers while the server drains."""
    in_group = [each.name() for each in server.processes() if os.getpgid(each.pid) == server.process.pid]
    assert not {"gcs_server", "raylet"} & set(in_group), in_group
    assert {"gcs_server", "raylet"} <= {each.name() for each in server.processes()}
    check_privacy(server.processes())
    endless = {**completion_body(500), "prompt": [[5, 6, 7]] * 64}
    with stream(server, completion_body(150)) as response, stream(server, endless) as other:
        lines, other_lines = response.iter_lines(), other.iter_lines()  # whose end would close the connection
        next(lines)
        next(other_lines)
        server.send_signal_to_group(signal.SIGHUP)  # as a terminal that is closed
        wait_for(lambda: "SIGHUP: files reopened: none" in server.text())
        server.send_signal_to_group(signal.SIGTERM)
        received = list(lines)
        assert "data: [DONE]" in received, received[-3:]
        assert any('"finish_reason":"length"' in line for line in received)
        wait_for(lambda: "shutting down" in server.text())
        server.send_signal_to_group(signal.SIGINT)
        assert server.process.wait(AMPLE_SECONDS) == 0, server.text()
    wait_for(lambda: not server.processes())
    server.reader.join(AMPLE_SECONDS)
    assert "calls end with an error because the server stops" in server.text()  # the stream may still be counted
    for text in ("Thread 0x", "Token authentication", "\x1b["):
        assert text not in server.text()


def stream(server: ReplicatedServer, body: dict[str, Any]) -> contextlib.AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{server.url}/completions", json={**body, "stream": True})


def check_privacy(processes: list[psutil.Process]) -> None:
    """Check that Ray cannot be used by others. Its folder would be accessible to all users."""
    listening = [each.laddr for one in processes for each in one.net_connections("tcp") if each.status == "LISTEN"]
    assert len(listening) >= 8
    assert {ip_address(address.ip.removeprefix("::ffff:")).is_loopback for address in listening} == {True}
    (gcs,) = [each for each in processes if each.name() == "gcs_server"]
    token = Path(gcs.environ()["RAY_AUTH_TOKEN_PATH"])
    assert [stat.S_IMODE(path.stat().st_mode) for path in (token.parent, token)] == [0o700, 0o600]
    (log_folder,) = [each.split("=")[1] for each in gcs.cmdline() if each.startswith("--log_dir=")]
    assert token.parent in Path(log_folder).parents


RAY_WITH_AN_ACTOR = """
import os
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
from chairlift.cluster.local_cluster import set_ray_variables
set_ray_variables()
from chairlift.cluster.ray_processes import RayProcesses
processes = RayProcesses(print, num_cpus=1, include_dashboard=False)
import ray, sys
actor = ray.remote(type("Actor", (), {"pid": lambda self: os.getpid()})).remote()
mode = os.environ["RAY_AUTH_MODE"]
print(processes.folder, ray.get(actor.pid.remote()), ray.util.get_node_ip_address(), mode, flush=True)
sys.stdin.read()
"""


def test_ray_listens_on_the_loopback_and_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    """Ray requires its token although the environment disables it. Its agents would otherwise continue for a minute."""
    command, pipes = [sys.executable, "-c", RAY_WITH_AN_ACTOR], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with marked_process(command, str(tmp_path), **pipes) as process:
        assert process.stdout is not None
        folder, actor, address, mode = process.stdout.readline().split()
        assert (address, mode) == ("127.0.0.1", "token")
        assert int(actor) in {each.pid for each in processes_with(str(tmp_path))}
        process.kill()
        process.wait()
        wait_for(lambda: not processes_with(str(tmp_path)))
    shutil.rmtree(folder)


def test_without_the_gcs_the_server_answers_and_then_ends_with_a_message(server: ReplicatedServer) -> None:
    with stream(server, completion_body(400)) as response:
        lines = response.iter_lines()
        next(lines)
        (gcs,) = [each for each in server.processes() if each.name() == "gcs_server"]
        gcs.kill()
        received = list(lines)
    assert "data: [DONE]" in received, received[-3:]
    assert server.process.wait(AMPLE_SECONDS) == 2, server.text()
    wait_for(lambda: not server.processes())
    server.reader.join(AMPLE_SECONDS)
    assert (
        "ERROR no replica can be started any more, and the server stops: gcs_server of Ray has ended" in server.text()
    )
    assert f"error: the server has stopped: gcs_server of Ray has ended with status {-signal.SIGKILL}" in server.text()
    logs = Path(server.text().split("the logs of Ray are in ")[1].split()[0])
    assert list(logs.rglob("gcs_server.out"))
    shutil.rmtree(logs)


def test_a_host_with_other_users_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.cluster.local_cluster.other_users", lambda: ["ann", "bob"])
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(ConfigError, match=r"other users of this machine \(ann, bob\) .* give --allow-other-users"):
        LocalCluster(EngineConfig(num_threads=1), ClusterOptions(1))


def test_the_start_waits_for_the_node_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    from chairlift.cluster import ray_processes

    def get_node(*arguments: str) -> tuple[str, ...]:
        calls.append(arguments)
        if len(calls) < 3:
            raise RuntimeError("not registered")
        return arguments

    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(services, "get_node", get_node)
    with ray_processes.RayProcesses._own_group(object.__new__(ray_processes.RayProcesses)):
        assert services.get_node("address", "node") == ("address", "node")  # type: ignore[no-untyped-call]
    assert (len(calls), services.get_node) == (3, get_node)
    calls.clear()
    monkeypatch.setattr(ray_processes, "NODE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="not registered"):
        ray_processes.wait_for_node(get_node)


def test_a_token_is_written_into_a_new_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.cluster.ray_processes import write_token

    monkeypatch.setattr(os, "environ", {"RAY_AUTH_TOKEN": "known"})
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for path in (link, tmp_path):
        with pytest.raises(OSError, match="File exists"):
            write_token(path)
    assert not target.exists()
    write_token(target)
    assert os.environ == {"RAY_AUTH_TOKEN_PATH": str(target)}
    assert len(target.read_text()) == 64


def test_a_server_that_is_starting_ends_when_ray_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main thread may wait for Ray; later the server drains."""
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda _pid, number: signals.append(number))
    cluster: LocalCluster = object.__new__(LocalCluster)
    cluster._drain = end_process
    cluster._fail("raylet has ended")
    assert signals == [signal.SIGTERM]
    assert cluster.failure == "raylet has ended"
    drains: list[str] = []
    cluster.on_failure(lambda: drains.append("failed before the server runs"))
    cluster._fail("raylet has ended")
    assert len(drains) == 2
    assert signals == [signal.SIGTERM]


def test_an_error_of_ray_is_one_line() -> None:
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    assert describe_ray_error(error) == str(error)
    assert describe_ray_error(RuntimeError("Deploying failed:\nTraceback\n  File ...\nValueError: x\n")) == (
        "Deploying failed: ValueError: x"
    )


def test_another_ray_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=head:6379 has no effect on --replicas.*: unset it, or run"):
        LocalCluster(EngineConfig(num_threads=1), ClusterOptions(1))
