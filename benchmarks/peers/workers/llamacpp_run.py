"""Runs llama-server of llama.cpp as a child process, and sends requests over HTTP with streaming."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from benchmarks.peers.records import (
    EngineRun,
    PeerRequest,
    RequestTiming,
    RequestTimings,
    clock,
    run_job,
    worker_arguments,
)

START_SECONDS: Final = 120.0
ANSWER_SECONDS: Final = 1800.0


@contextmanager
def running_server(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start the server and yield it when it is healthy."""
    with TemporaryFile("w+b") as log:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
        try:
            if not wait_until_healthy(server, port):
                log.seek(0)
                raise SystemExit(f"llama-server did not start: {log.read().decode(errors='replace')[-2000:]}")
            yield server
        finally:
            server.terminate()
            server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    return False


def send_request(port: int, request: PeerRequest, start: threading.Event) -> RequestTiming:
    """Send one streamed request. A chunk has the number of tokens so far, which includes tokens that the server held
    back until their character was complete."""
    body = {
        "prompt": request.prompt_token_ids,
        "n_predict": request.output_len,
        "ignore_eos": True,
        "temperature": 0,
        "samplers": ["top_k"],
        "top_k": 1,
        "cache_prompt": False,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
    try:
        connection.connect()
        start.wait()
        timing = RequestTiming(clock())
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"llama-server: http {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            if line.startswith(b"data: "):
                known = json.loads(line[6:]).get("tokens_predicted", 0)
                timing.token_times += [clock()] * (known - len(timing.token_times))
        return timing
    finally:
        connection.close()


def drive(port: int, requests: list[PeerRequest]) -> RequestTimings:
    """Send each request on its own thread. All threads connect before the first request is sent."""
    start = threading.Event()
    with ThreadPoolExecutor(len(requests)) as pool:
        futures = {request.request_id: pool.submit(send_request, port, request, start) for request in requests}
        start.set()
        return {request_id: future.result() for request_id, future in futures.items()}


def peak_rss_of(process_id: int) -> int:
    """Peak RSS of a running process in bytes (Linux)."""
    status = Path(f"/proc/{process_id}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def version_of(program: str) -> str:
    """The version of llama.cpp and its compiler, which determines the speed."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    return ", ".join(line for line in lines if line.startswith(("version", "built with")))


def main() -> None:
    job, out = worker_arguments()
    command: list[Any] = job.options["command"]
    port = free_port()
    with running_server(command, port) as server:
        timings = run_job(job, lambda requests: drive(port, requests))
        peak = peak_rss_of(server.pid)
    EngineRun(*timings, peak, {"llama.cpp": version_of(command[0])}).write(out)


if __name__ == "__main__":
    main()
