"""A real server on a real socket, in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import uvicorn

from chairlift import AsyncLLM
from chairlift.server.app import create_app

MODEL = "smollm2-135m-instruct"


@dataclass(slots=True)
class RunningServer:
    """A server and ways to talk to it."""

    llm: AsyncLLM
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while self.llm.num_unfinished or not self.llm.engine.core.scheduler.is_idle:
            assert time.monotonic() < deadline, "requests are still in the engine"
            time.sleep(0.01)


@contextlib.contextmanager
def run_server(llm: AsyncLLM, name: str | None = None) -> Iterator[RunningServer]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(llm, name), log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield RunningServer(llm, f"http://127.0.0.1:{listener.getsockname()[1]}")
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()
