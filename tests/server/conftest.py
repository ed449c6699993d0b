"""A real server on a real socket, in a thread, over the default model."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
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


@pytest.fixture(scope="session")
def server(smollm2_gguf: Path) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(smollm2_gguf), num_kv_blocks=200, num_threads=1, max_num_seqs=4)
    with run_server(llm, MODEL) as running:
        yield running


@pytest.fixture
def tiny_server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    llm = AsyncLLM(
        model=str(tiny_model_dir("llama")), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1, max_num_seqs=1
    )
    with run_server(llm, "tiny") as running:
        yield running
