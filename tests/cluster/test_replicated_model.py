"""The API over several replicas: requests and their explanations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.cluster.replicated_model import observe_replicas
from chairlift.server.http.application import create_app
from in_process_cluster import InProcessTransport, make_cluster
from running_server import run_app, wait_for


@dataclass
class ClusterServer:
    """A server over replicas in this process."""

    llm: AsyncLLM
    transport: InProcessTransport
    url: str

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}{path}", timeout=20)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)


Serve = Callable[..., Any]


@pytest.fixture
def serve(tiny_model_dir: Callable[..., Path]) -> Serve:
    folder = str(tiny_model_dir("llama"))

    @contextmanager
    def run(num_replicas: int = 2, **options: Any) -> Iterator[ClusterServer]:
        options = {"num_threads": 1, "skip_tokenizer_init": True, "enable_kv_cache_events": True, "seed": 0, **options}
        engines = [AsyncLLM(model=folder, num_kv_blocks=64, **options) for _ in range(num_replicas)]
        llm, transport = make_cluster(*engines)
        app = create_app(llm, "tiny")
        observe_replicas(app.state.models.default, llm._client)  # type: ignore[arg-type]
        with run_app(app) as (url, _server):
            wait_for(lambda: transport.view._subscribed.keys() == transport.view._running)
            yield ClusterServer(llm, transport, url)

    return run


@pytest.mark.parametrize("kind", ["", "/explain"])
def test_the_sequences_of_a_call_are_found_on_all_replicas(serve: Serve, kind: str) -> None:
    with serve() as server:
        prompts = [[index, 5, 6, 7] for index in range(12)]
        server.complete([1, 2, 3], max_tokens=1, request_id="other")
        call_id = server.complete(prompts, max_tokens=4, n=2, seed=0, request_id="many").json()["id"]
        assert min(server.transport.num_runs.values()) > 1
        ids = [each["id"].rpartition("~")[0] for each in server.get(f"/v1/requests/{call_id}{kind}")["sequences"]]
        assert ids == [f"{call_id}.{index}" for index in range(12) for _ in range(2)]
        assert len(server.get(f"/v1/requests/{call_id}.7{kind}")["sequences"]) == 2
