"""Work for a client ends within a second after it has left, on every route. A new route fails until it is declared.

A second is counted, not measured: each unit of work sleeps for UNIT_SECONDS, so that a slow machine slows down all.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from declared_routes import ADMINS, COUNTED, PUBLIC, READS, routes_of

from chairlift import AsyncLLM
from chairlift.engine.event_hub import EventHub
from chairlift.engine.explanation.what_if import BlockedRequest, WhatIf
from chairlift.server.application import create_models_app
from chairlift.server.draining_server import DrainingServer
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.models.served_model import ModelService, ServedModel
from chairlift.server.preparation.api_options import ApiOptions
from support.plain_http import NO_TLS
from support.pooling_models import write_pooling_model
from support.running_server import completion_body, open_options, run_app
from support.waiting import AMPLE_SECONDS, wait_for

UNIT_SECONDS: Final = 0.02
UNITS_PER_SECOND: Final = round(1 / UNIT_SECONDS)
NUM_TOKENS: Final = 400
TEXTS: Final = ["the dog"] * 200
MESSAGES: Final = [{"role": "user", "content": "one"}]
GENERATES: Final = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
PAIRS: Final = {"model": "encoder", "query": "a dog", "documents": TEXTS}

ENGINE_CALLS: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": [5, 6], **GENERATES},
    "/v1/chat/completions": {"messages": MESSAGES, **GENERATES},
    "/v1/responses": {"input": "one", "max_output_tokens": NUM_TOKENS, "ignore_eos": True},
    "/v1/messages": {"messages": MESSAGES, **GENERATES},
    "/v1/embeddings": {"model": "encoder", "input": TEXTS},
    "/v1/score": {"model": "encoder", "text_1": "a dog", "text_2": TEXTS},
    "/score": {"model": "encoder", "text_1": "a dog", "text_2": TEXTS},
    "/v1/rerank": PAIRS,
    "/rerank": PAIRS,
    "/v2/rerank": PAIRS,
    "/v1/page/burst": {"num_requests": 8, "min_output_tokens": 100, "max_output_tokens": 100},
}
"""Calls whose steps take more than a second."""

RENDERED: Final = {path for path in COUNTED if path.endswith("/render")}
PLANNED: Final = {"/v1/messages/count_tokens", "/tokenize", "/detokenize", *RENDERED}
"""Calls whose only work is proportional to their bodies."""

THREADED: Final = {"/v1/requests/{request_id}/explain"}
"""Calls that compute on a thread of the server."""

STREAMS: Final = {"/v1/events", "/v1/page/events"}
"""Streams of events that end with the client."""

CHANGES: Final = {"/models/load", "/models/unload", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Calls of admins that change what all clients use. They are completed, also for a client that has left."""

CONSTANT: Final = PUBLIC | (READS | ADMINS) - STREAMS - CHANGES
"""Calls that read what the server has, without waiting for anything."""


@dataclass(slots=True)
class WorkCounter:
    """The units of work that the server has done, and the number of threads that do some."""

    num_units: int = 0
    num_running: int = 0

    def add(self) -> None:
        self.num_units += 1
        time.sleep(UNIT_SECONDS)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1


@dataclass(frozen=True, slots=True)
class WorkingServer:
    """A server with a model that generates and an encoder, both of one seat, whose work is counted."""

    url: str
    uvicorn: DrainingServer
    models: list[AsyncLLM]
    work: WorkCounter

    def is_idle(self) -> bool:
        is_computing = any(llm.num_unfinished or not llm.engine.core.scheduler.is_idle for llm in self.models)
        is_answering = len(self.uvicorn.server_state.tasks) > 0
        return not (is_computing or is_answering or self.work.num_running)

    def leave_during(self, path: str, body: dict[str, Any] | None, has_begun: Callable[[], bool]) -> int:
        """Make a call, disconnect when its work has begun, and return the units of work until the server is idle."""
        wait_for(self.is_idle)
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        with socket.create_connection(
            ("127.0.0.1", int(self.url.rsplit(":", 1)[1])), timeout=AMPLE_SECONDS
        ) as connection:
            connection.sendall(head.encode() + content)
            wait_for(has_begun)
        before = self.work.num_units
        wait_for(self.is_idle)
        return self.work.num_units - before

    def has_worked(self, num_units: int = 3) -> Callable[[], bool]:
        """Whether this many units of work were done since this call."""
        start = self.work.num_units
        return lambda: self.work.num_units >= start + num_units


def count_steps(llm: AsyncLLM, work: WorkCounter) -> None:
    """Count each step of an engine as a unit of work."""
    executor = llm.engine.core._executor
    submit = executor.submit

    def slow_submit(output: Any) -> Any:
        work.add()
        return submit(output)

    executor.submit = slow_submit  # type: ignore[method-assign]


def serve_model(name: str, llm: AsyncLLM) -> ServedModel:
    model = ServedModel(ModelSpec(name), llm.events)
    model.set_service(ModelService(llm, ApiOptions()))
    return model


@pytest.fixture(scope="module")
def server(api_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkingServer]:
    encoder = str(write_pooling_model(tmp_path_factory.mktemp("encodes"), "bert"))
    options: dict[str, Any] = {"num_threads": 1, "max_num_seqs": 1}
    models = [AsyncLLM(model=str(api_folder), num_kv_blocks=200, **options), AsyncLLM(model=encoder, **options)]
    work = WorkCounter()
    for llm in models:
        count_steps(llm, work)

    manager = ModelManager([serve_model("tiny", models[0]), serve_model("encoder", models[1])])
    with run_app(create_models_app(manager, open_options(page_control=True))) as (url, uvicorn):
        yield WorkingServer(url, uvicorn, models, work)
    manager.close()


def post(server: WorkingServer, path: str, body: dict[str, Any]) -> None:
    httpx.post(server.url + path, json=body, timeout=AMPLE_SECONDS, verify=NO_TLS).raise_for_status()


def test_the_work_of_every_route_is_declared_once(server: WorkingServer) -> None:
    declared = [*ENGINE_CALLS, *PLANNED, *THREADED, *STREAMS, *CHANGES, *CONSTANT]
    assert sorted(declared) == sorted({*declared})
    assert {*routes_of(server.uvicorn.config.app)} <= {*declared}
    assert {*COUNTED} == {*ENGINE_CALLS, *PLANNED, *THREADED}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ENGINE_CALLS)
def test_steps_end_with_the_client(server: WorkingServer, path: str, is_stream: bool) -> None:
    body = ENGINE_CALLS[path]
    if is_stream:
        if "ignore_eos" not in body:
            pytest.skip("this route does not generate text")
        body = {**body, "stream": True}
    assert server.leave_during(path, body, server.has_worked()) < UNITS_PER_SECOND


def test_an_explanation_ends_with_the_client(server: WorkingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_blocked: BlockedRequest) -> list[WhatIf]:
        with server.work.running():
            for _ in range(UNITS_PER_SECOND // 2):
                server.work.add()
        return []

    post(server, "/v1/completions", {**completion_body(2), "n": 40, "request_id": "crowd", "temperature": 1})
    monkeypatch.setattr("chairlift.server.api.requests.what_ifs", slow)
    path = "/v1/requests/cmpl-crowd/explain"
    assert server.leave_during(path, None, server.has_worked()) < UNITS_PER_SECOND


@pytest.mark.parametrize("path", sorted(STREAMS))
def test_a_reader_of_events_ends_with_the_client(server: WorkingServer, path: str) -> None:
    hub: EventHub = server.models[0].events
    num_listeners = len(hub._listeners)
    server.leave_during(path, None, lambda: len(server.uvicorn.server_state.tasks) == 1)
    assert len(hub._listeners) == num_listeners
