"""A large body gives the same response as a small one, and other calls do not wait for it."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.errors import RequestError
from chairlift.server.access.admission import AdmissionController
from chairlift.server.api import routes
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.models.model_manager import ModelManager
from chairlift.server.models.served_model import NUM_THREADS
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.protocol.base import RequestBody
from chairlift.server.protocol.completions import CompletionRequest
from support.plain_http import NO_TLS
from support.running_server import RunningServer, run_server
from support.waiting import AMPLE_SECONDS, until, wait_for

PADDING = b" " * LARGE_BODY
MESSAGES = [{"role": "user", "content": "one two"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "boolean"}}}
WRONG_SCHEMA = {"type": "nothing"}
WRONG_FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": WRONG_SCHEMA}}
WRONG_OUTPUT = {"format": {"type": "json_schema", "schema": WRONG_SCHEMA}}
FORCED = {"tools": TOOLS, "tool_choice": "required"}
NAMESPACE = {
    "tools": [{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "look"}]}],
    "tool_choice": {"type": "function", "name": "look", "namespace": "ns"},
}
GREEDY = {"temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def server(api_folder: Path) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(api_folder), num_kv_blocks=200, num_threads=1, enable_prefix_caching=False)
    with run_server(llm, "tiny") as running:
        yield running


def post(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=AMPLE_SECONDS, verify=NO_TLS)


def without_ids(value: Any) -> Any:
    """A response without the fields that differ between two equal calls."""
    if isinstance(value, dict):
        changing = {"id", "created", "created_at", "completed_at", "call_id"}
        return {key: without_ids(entry) for key, entry in value.items() if key not in changing}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "echo": True, "logprobs": 1, **GREEDY}),
    ("/v1/completions", {"prompt": [[3, 4], [5]], "max_tokens": 2, "n": 2, **GREEDY}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 6, "structured_outputs": {"choice": ["yes", "no"]}, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30, **FORCED, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 9, "response_format": SCHEMA, **GREEDY}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stop": ["zz"], "bad_words": ["a"], **GREEDY}),
    ("/v1/responses", {"input": "one", "max_output_tokens": 4, "instructions": "be", "metadata": {"a": "b"}, **GREEDY}),
    ("/v1/responses", {"input": "one", "max_output_tokens": 9, **NAMESPACE, **GREEDY}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "system": "be", **GREEDY}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "one two", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [3, 4, 5]}),
    # -- errors --
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": MESSAGES, "model": "other"}),
    ("/v1/chat/completions", {"messages": MESSAGES, "top_logprobs": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "response_format": WRONG_FORMAT}),
    ("/v1/completions", {"prompt": [], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "x", "nonsense": 1}),
    ("/v1/completions", {"prompt": "x", "stop": ["\ud800"]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\udc00"}]}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": -1}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 0}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2, "min_tokens": 3}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "output_config": WRONG_OUTPUT}),
    ("/detokenize", {"tokens": [999_999]}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_the_response_does_not_depend_on_the_size(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    small, large = post(server, path, content), post(server, path, content + PADDING)
    assert large.status_code == small.status_code
    assert without_ids(large.json()) == without_ids(small.json())


def test_a_stream_does_not_depend_on_the_size_of_the_body(server: RunningServer) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "stream": True, **GREEDY}).encode()

    def streamed(content: bytes) -> tuple[str, str]:
        """The text and the finish reason. How many deltas the text has depends on the speed of the server."""
        lines = post(server, "/v1/chat/completions", content).text.splitlines()
        choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]

    assert streamed(body + PADDING) == streamed(body)
    assert streamed(body)[0]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": ' + PADDING, "not valid JSON"),
        (b"[" * 300 + PADDING, "recursion limit exceeded"),
        (b'{"prompt": "\xff"}' + PADDING, "invalid unicode code point"),
    ],
)
def test_large_bodies_that_are_not_json_are_reported(server: RunningServer, content: bytes, problem: str) -> None:
    answer = post(server, "/v1/completions", content)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


class HeldThreads:
    """Holds the parsing or planning of large bodies until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
        self.num_held = 0
        self.release = threading.Event()
        parse, render = routes.parse_json, ModelPlanner._render

        def parse_json(body_type: Any, raw: bytes) -> Any:
            if stage == "parse" and len(raw) >= LARGE_BODY:
                self._hold()
            return parse(body_type, raw)

        def held_render(planner: ModelPlanner, body: Any, tools: Any) -> Any:
            if stage == "plan" and body.messages[0].name == "large":
                self._hold()
            return render(planner, body, tools)

        monkeypatch.setattr(routes, "parse_json", parse_json)
        monkeypatch.setattr(ModelPlanner, "_render", held_render)

    def _hold(self) -> None:
        self.num_held += 1
        assert self.release.wait(AMPLE_SECONDS)


@pytest.fixture(params=["parse", "plan"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldThreads]:
    threads = HeldThreads(monkeypatch, request.param)
    yield threads
    threads.release.set()


SMALL_CHAT = {"messages": MESSAGES, "max_tokens": 3, **GREEDY}
LARGE_CHAT = {**SMALL_CHAT, "messages": [{**MESSAGES[0], "name": "large"}]}


def test_small_calls_finish_while_large_bodies_are_prepared(server: RunningServer, held: HeldThreads) -> None:
    with ThreadPoolExecutor(NUM_THREADS + 1) as pool:
        content = json.dumps(LARGE_CHAT).encode() + PADDING
        large = [pool.submit(post, server, "/v1/chat/completions", content) for _ in range(NUM_THREADS + 1)]
        wait_for(lambda: held.num_held > 0 and server.admission.num_calls == len(large))
        small = server.post("/v1/chat/completions", SMALL_CHAT)
        assert not any(call.done() for call in large)
        held.release.set()
    assert [call.result().status_code for call in large] == [200] * len(large)
    assert small.json()["usage"]["completion_tokens"] == 3


def test_a_call_counts_until_its_thread_has_ended(server: RunningServer, held: HeldThreads) -> None:
    connection = server.send("/v1/chat/completions", {**LARGE_CHAT, "user": "x" * LARGE_BODY})
    wait_for(lambda: held.num_held == 1)
    connection.close()
    server.post("/v1/chat/completions", SMALL_CHAT)  # The server has read the end of the other connection before it.
    assert server.admission.num_calls == 1
    held.release.set()
    wait_for(lambda: server.admission.num_calls == 0)


def existing_bodies() -> list[RequestBody]:
    """All bodies, messages and parts."""
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), RequestBody)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
        ("/v1/completions", {"prompt": "one two"}),
        ("/v1/messages", {"messages": MESSAGES, "system": "be", "max_tokens": 9}),
        ("/v1/responses", {"input": [{"role": "user", "content": "one"}]}),
    ],
)
def test_a_call_keeps_its_content_only_until_it_is_planned(
    server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    content = json.dumps({**body, "stream": True}).encode()
    before = existing_bodies()
    with ThreadPoolExecutor(1) as pool, server.hold_steps():
        call = pool.submit(post, server, path, content)
        wait_for(lambda: server.llm.num_unfinished == 1)
        (kept,) = [body for body in existing_bodies() if body not in before]
        assert all(getattr(kept, name) is None for name in kept.content_fields)
    assert call.result().status_code == 200


def parse_for_tenants(caller: routes.EndpointCaller, tenants: str) -> list[Any]:
    """Let a tenant for each letter parse a large body, after all of them wait."""
    release, turns = threading.Event(), caller._large_thread

    async def body() -> bytes:
        return PADDING

    async def run() -> list[Any]:
        turns.submit("", release.wait, AMPLE_SECONDS)
        request: Any = SimpleNamespace(body=body)
        calls: list[Any] = [SimpleNamespace(key=SimpleNamespace(tenant=tenant)) for tenant in tenants]
        bodies = (caller._parse(SimpleNamespace(tenant=call.key.tenant), request, call) for call in calls)  # type: ignore[arg-type]
        parsed = asyncio.gather(*bodies, return_exceptions=True)
        await until(lambda: sum(map(len, turns._waiting.values())) == len(tenants))
        release.set()
        return await parsed

    return asyncio.run(run())


def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(routes, "parse_json", lambda kind, _raw: order.append(kind.tenant))
    parse_for_tenants(routes.EndpointCaller(ModelManager([]), AdmissionController()), "aaabbc")
    assert order == ["a", "b", "c", "a", "b", "a"]


def test_bodies_that_wait_while_the_server_stops_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = ModelManager([])
    monkeypatch.setattr(routes, "parse_json", lambda _kind, _raw: manager.stop("stopped"))
    first, *others = parse_for_tenants(routes.EndpointCaller(manager, AdmissionController()), "aaa")
    assert first is None
    assert [str(error) for error in others] == ["stopped", "stopped"]


def test_nothing_is_collected_as_garbage_while_a_large_body_is_parsed() -> None:
    collections: list[str] = []

    def record(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.callbacks.append(record)
    try:
        with pytest.raises(RequestError, match="prompt"):
            routes.parse_large_json(CompletionRequest, b'{"prompt": [' + b"[]," * 100_000 + b"[]]}")
    finally:
        gc.callbacks.remove(record)
    assert not collections
    assert gc.isenabled()
