"""A real server on a real socket, in a thread."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from fastapi import FastAPI

from chairlift import AsyncLLM
from chairlift.cluster.cluster_app import observe_replicas
from chairlift.server.access.access_options import AccessOptions, ServerLimits
from chairlift.server.access.admission import AdmissionController
from chairlift.server.access.keys import KeyRing
from chairlift.server.application import create_app
from chairlift.server.draining_server import DrainingServer
from chairlift.server.http.http_protocol import uvicorn_config
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.serve_options import ObservabilityOptions, ServeOptions
from chairlift.server.telemetry.access_log import AccessLog
from support.in_process_cluster import make_cluster
from support.plain_http import NO_TLS
from support.step_gate import StepGate
from support.waiting import AMPLE_SECONDS, wait_for

ON_CLUSTER = os.environ.get("TEST_ON_CLUSTER") == "1"
"""Whether servers use their engine as the only replica of a cluster."""

MODEL = "smollm2-135m-instruct"


def completion_body(tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a completion with exactly `tokens` output tokens."""
    return {"prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **fields}


@dataclass(slots=True)
class RunningServer:
    """A server and ways to talk to it."""

    llm: AsyncLLM
    url: str
    admission: AdmissionController
    uvicorn: DrainingServer
    access_log: Path | None = None

    def client(self, api_key: str = "unused") -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=NO_TLS)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=AMPLE_SECONDS, http_client=http
        )

    def post(self, path: str, body: object, api_key: str = "unused") -> httpx.Response:
        headers = {"Authorization": f"Bearer {api_key}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=AMPLE_SECONDS, verify=NO_TLS)

    def logged_calls(self) -> list[dict[str, Any]]:
        """The lines of the access log, without a half-written last one. A line is written after its answer is sent."""
        assert self.access_log is not None
        return [json.loads(line) for line in self.access_log.open() if line.endswith("\n")]

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A plain connection."""
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(("127.0.0.1", int(self.url.rsplit(":", 1)[1])))
        connection.settimeout(AMPLE_SECONDS)
        return connection

    def send(self, path: str, body: object, api_key: str = "unused") -> socket.socket:
        """Send a call, and return its connection without reading the response."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {api_key}\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        return connection

    def slow_down(self, seconds: float = 0.02) -> None:
        """Make every step take a while."""
        executor = self.llm.engine.core._executor
        submit = executor.submit

        def slow(output: Any) -> Any:
            time.sleep(seconds)
            return submit(output)

        executor.submit = slow

    def hold_steps(self) -> StepGate:
        """Hold the steps of the engine until the gate allows them."""
        return StepGate(self.llm.engine.core)

    def wait_until_idle(self) -> None:
        wait_for(lambda: not self.llm.num_unfinished and self.llm.engine.core.scheduler.is_idle)


def open_options(
    name: str | None = None,
    *,
    keys: KeyRing | None = None,
    limits: ServerLimits | None = None,
    api: ApiOptions | None = None,
    observability: ObservabilityOptions | None = None,
    allowed_origins: tuple[str, ...] = (),
    allowed_hosts: Sequence[str] | None = None,
    page_control: bool | None = None,
) -> ServeOptions:
    """The options of a server for every host, without an access log."""
    return ServeOptions(
        served_model_name=name,
        limits=limits or ServerLimits(),
        access=AccessOptions(
            keys=keys or KeyRing(),
            allow_unauthenticated=not keys,
            allowed_hosts=None if allowed_hosts is None else tuple(allowed_hosts),
            allowed_origins=allowed_origins,
        ),
        api=api or ApiOptions(),
        observability=observability or ObservabilityOptions("none"),
        page_control=page_control,
    )


def redirect_access_log(app: FastAPI, path: Path) -> None:
    """Let the access log of an application write to a file instead of standard error."""
    for listener in app.state.listeners:
        if isinstance(listener, AccessLog):
            listener._file = path.open("w")  # type: ignore[assignment]


def until_closed(connection: socket.socket) -> bytes:
    """The bytes that arrive until the server closes the TCP connection."""
    received = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


@contextlib.contextmanager
def run_server(
    llm: AsyncLLM,
    name: str | None = None,
    *,
    keys: KeyRing | None = None,
    limits: ServerLimits | None = None,
    api: ApiOptions | None = None,
    access_log: Path | None = None,
    allowed_origins: tuple[str, ...] = (),
    tls: tuple[Path, Path] | None = None,
    allowed_hosts: Sequence[str] | None = None,
    page_control: bool | None = None,
    root_path: str = "",
) -> Iterator[RunningServer]:
    if ON_CLUSTER:
        llm, _transport = make_cluster(llm)
    options = open_options(
        name,
        keys=keys,
        limits=limits,
        api=api,
        observability=None if access_log is None else ObservabilityOptions("json"),
        allowed_origins=allowed_origins,
        allowed_hosts=allowed_hosts,
        page_control=page_control,
    )
    app = create_app(llm, options)
    if access_log is not None:
        redirect_access_log(app, access_log)
    if ON_CLUSTER:
        observe_replicas(app.state.models.default, llm._client)
    with run_app(app, tls, root_path) as (url, server):
        yield RunningServer(llm, url, app.state.admission, server, access_log)


@contextlib.contextmanager
def run_app(
    app: FastAPI, tls: tuple[Path, Path] | None = None, root_path: str = ""
) -> Iterator[tuple[str, DrainingServer]]:
    """Run an application on a free port; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    certfile, keyfile = tls or (None, None)
    files = {"ssl_certfile": certfile, "ssl_keyfile": keyfile}
    config = uvicorn_config(app, **files, root_path=root_path, timeout_keep_alive=75, log_level="warning")
    server = DrainingServer(config, app.state.models, app.state.admission)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    scheme = "http" if tls is None else "https"
    yield f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", server
    server.should_exit = True
    thread.join(AMPLE_SECONDS)
    assert not thread.is_alive()
