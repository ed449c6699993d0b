"""Preparation workers give the same responses as the server, in a fair order, and are restarted when they end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_model import with_api_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from byte_tokenizer import VOCAB_SIZE
from chairlift import AsyncLLM
from chairlift.errors import EngineDeadError, OverloadedError, RequestError
from chairlift.loading.resolve import resolve_model
from chairlift.server.access.keys import Key, KeyInfo, KeyRing, digest
from chairlift.server.api.endpoints import make_planners
from chairlift.server.http.body_limits import LARGE_BODY
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.planners import PlanningModel, PreparedRequest, RequestPlanner
from chairlift.server.preparation.preparation import (
    PreparationWorkers,
    TenantQueues,
)
from chairlift.server.preparation.worker import prepare
from chairlift.server.preparation.worker_process import (
    WorkerSetup,
    tokenizer_fingerprint,
)
from chairlift.server.protocol.tokenization import DetokenizeRequest
from plain_http import NO_TLS
from running_server import RunningServer, run_server
from waiting import AMPLE_SECONDS, until, wait_for

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
def setup(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny engine, and the setup of its workers."""
    tiny = tiny_model_dir("llama", vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    folder = with_api_tokenizer(tiny, tmp_path_factory.mktemp("preparation"))
    llm = AsyncLLM(model=str(folder), num_kv_blocks=200, num_threads=1, enable_prefix_caching=False)
    fingerprint = tokenizer_fingerprint(resolve_model(str(folder)))
    return llm, WorkerSetup(str(folder), False, llm.engine.facts, ApiOptions(), fingerprint, make_planners())


def planning_model(setup: Any) -> PlanningModel:
    return PlanningModel(setup[0].engine, ApiOptions())


@pytest.fixture(scope="module")
def workers(setup: Any) -> PreparationWorkers:
    return PreparationWorkers(setup[1], num_workers=1)


@pytest.fixture(scope="module")
def server(setup: Any, workers: PreparationWorkers) -> Iterator[RunningServer]:
    keys = KeyRing(
        [
            Key(KeyInfo("ops", "ops", True), digest("ops-secret")),
            Key(KeyInfo("eve", "eve", False), digest("eve-secret")),
        ]
    )
    with run_server(setup[0], "tiny", keys=keys, workers=workers) as running:
        yield running


def post(server: RunningServer, path: str, content: bytes, secret: str = "ops-secret") -> httpx.Response:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, verify=NO_TLS)


def without_ids(value: Any) -> Any:
    """A response without the fields that differ between two equal calls."""
    if isinstance(value, dict):
        changing = {"id", "created", "created_at", "completed_at", "call_id"}
        return {key: without_ids(entry) for key, entry in value.items() if key not in changing}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "one two", "max_tokens": 4, "echo": True, "logprobs": 1, **GREEDY}),
    ("/v1/completions", {"prompt": [[3, 4], [5]], "max_tokens": 2, "n": 2, "best_of": 2, **GREEDY}),
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
    ("/v1/responses", {"input": "x", "max_output_tokens": 100_000}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 2, "min_tokens": 3}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "output_config": WRONG_OUTPUT}),
    ("/detokenize", {"tokens": [999_999]}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_worker_gives_the_same_response_as_the_server(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    small, large = post(server, path, content), post(server, path, content + PADDING)
    assert large.status_code == small.status_code
    assert without_ids(large.json()) == without_ids(small.json())


def test_a_stream_does_not_depend_on_the_size_of_the_body(server: RunningServer) -> None:
    body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "stream": True, **GREEDY}).encode()

    def deltas(content: bytes) -> list[Any]:
        lines = post(server, "/v1/chat/completions", content).text.splitlines()
        return [without_ids(json.loads(line[6:])) for line in lines if line.startswith("data: {")]

    assert deltas(body + PADDING) == deltas(body)
    assert len(deltas(body)) > 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"prompt": ' + PADDING, "not valid JSON"),
        (b"[" * 70 + PADDING, "70 deep, and at most 64 levels"),
        (b'{"prompt": "\xff"}' + PADDING, "invalid unicode code point"),
    ],
)
def test_large_bodies_that_are_not_json_are_reported(server: RunningServer, content: bytes, problem: str) -> None:
    answer = post(server, "/v1/completions", content)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_the_error_of_a_body_does_not_keep_the_body_in_memory(setup: Any) -> None:
    outcome = prepare(
        RequestPlanner(DetokenizeRequest, lambda _model, _body: None), planning_model(setup), b'{"tokens": '
    )
    assert isinstance(outcome, RequestError)
    assert "not valid JSON" in str(outcome)
    assert (outcome.__traceback__, outcome.__context__) == (None, None)


def test_a_worker_that_is_killed_is_started_again(server: RunningServer, workers: PreparationWorkers) -> None:
    body = json.dumps({"tokens": [3]}).encode() + PADDING
    assert post(server, "/detokenize", body).status_code == 200
    pid = workers.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    answer = post(server, "/detokenize", body)
    if answer.status_code == 503:  # The body was sent before the end of the process was known.
        assert "the worker process ended" in answer.json()["error"]["message"]
        answer = post(server, "/detokenize", body)
    assert answer.status_code == 200
    assert workers.processes[0].pid != pid


def run_alone(setup: WorkerSetup, scenario: Callable[[PreparationWorkers], Any], **options: Any) -> Any:
    async def run() -> Any:
        workers = PreparationWorkers(setup, num_workers=1, **options)
        try:
            return await scenario(workers)
        finally:
            workers.close()

    return asyncio.run(run())


def test_cancelling_a_call_ends_its_work(setup: Any) -> None:
    body = json.dumps({"tokens": [3]}).encode()

    async def scenario(workers: PreparationWorkers) -> None:
        await workers.run("a", "/detokenize", body)
        pid = workers.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # As if it computed for a long time.
        call = asyncio.ensure_future(workers.run("a", "/detokenize", body))
        waiting = asyncio.ensure_future(workers.run("b", "/detokenize", body))
        await asyncio.sleep(0)  # The call gets its turn.
        assert not workers._free
        call.cancel()
        assert isinstance(await waiting, PreparedRequest)
        assert workers.processes[0].pid != pid

    run_alone(setup[1], scenario)


def test_a_body_that_takes_too_long_is_rejected(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        body = json.dumps({"tokens": [3]}).encode()
        await workers.run("a", "/detokenize", body)
        pid = workers.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        workers._max_seconds = 0.2
        with pytest.raises(RequestError, match=r"took more than 0.2 s: shorten it"):
            await workers.run("a", "/detokenize", body)
        workers._max_seconds = AMPLE_SECONDS
        assert isinstance(await workers.run("a", "/detokenize", body), PreparedRequest)

    run_alone(setup[1], scenario)


def test_an_idle_worker_ends(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        await workers.run("a", "/detokenize", b'{"tokens": [3]}')
        pid = workers.processes[0].pid
        assert pid is not None
        await until(lambda: not workers.processes[0].is_running)

    run_alone(setup[1], scenario, idle_seconds=0.05)


def test_closing_the_pool_ends_its_workers(setup: Any) -> None:
    pids: list[int | None] = []

    async def scenario(workers: PreparationWorkers) -> None:
        await workers.run("a", "/detokenize", b'{"tokens": [3]}')
        pids.append(workers.processes[0].pid)

    run_alone(setup[1], scenario)
    assert pids[0] is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@given(st.lists(st.sampled_from("abc"), max_size=12))
def test_tenants_are_served_in_rotation(tenants: list[str]) -> None:
    loop = asyncio.new_event_loop()
    try:
        queues = TenantQueues()
        turns = [(tenant, loop.create_future()) for tenant in tenants]
        for tenant, turn in turns:
            queues.push(tenant, turn)
        tenant_of = {turn: tenant for tenant, turn in turns}
        order = [tenant_of[turn] for turn in iter(queues.pop, None)]
    finally:
        loop.close()
    assert sorted(order) == sorted(tenants)
    for first, last in ((i, j) for i in range(len(order)) for j in range(i, len(order))):
        window = order[first : last + 1]
        waiting = [tenant for tenant in set(tenants) if tenant in order[last + 1 :] and tenant in order[:last]]
        for tenant in waiting:  # While a tenant has jobs, no other tenant runs two more jobs than it.
            assert all(window.count(other) <= window.count(tenant) + 1 for other in window)


def test_cancelled_turns_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    try:
        queues = TenantQueues()
        turns = [loop.create_future() for _ in range(3)]
        for turn in turns:
            queues.push("a", turn)
        turns[0].cancel()
        assert [queues.pop(), queues.pop(), queues.pop()] == [turns[1], turns[2], None]
    finally:
        loop.close()


def test_a_call_that_is_cancelled_with_its_turn_returns_the_process(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        body = json.dumps({"tokens": [3]}).encode()
        first = asyncio.ensure_future(workers.run("a", "/detokenize", body))
        waiting = asyncio.ensure_future(workers.run("b", "/detokenize", body))
        await first
        waiting.cancel()
        assert isinstance(await asyncio.wait_for(workers.run("c", "/detokenize", body), AMPLE_SECONDS), PreparedRequest)

    run_alone(setup[1], scenario)


def test_stopping_the_pool_ends_waiting_and_running_calls(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        body = json.dumps({"tokens": [3]}).encode()
        await workers.run("a", "/detokenize", body)
        assert workers.processes[0].pid is not None
        os.kill(workers.processes[0].pid, signal.SIGSTOP)
        calls = [asyncio.ensure_future(workers.run("a", "/detokenize", body)) for _ in range(2)]
        await asyncio.sleep(0)  # The first call gets its turn.
        assert not workers._free
        workers.stop(EngineDeadError("stopped"))
        for call in calls:
            with pytest.raises(EngineDeadError, match="stopped"):
                await call

    run_alone(setup[1], scenario)


@pytest.mark.parametrize("moment", ["before the start", "during the start"])
def test_stopping_the_pool_ends_a_call_whose_worker_is_not_running_yet(
    setup: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    popen = subprocess.Popen

    async def scenario(workers: PreparationWorkers) -> None:
        loop = asyncio.get_running_loop()
        process = workers.processes[0]
        run = process.run

        async def stop() -> None:
            workers.stop(EngineDeadError("stopped"))

        def stop_and_run(endpoint: str, body: bytes, seconds: float) -> Any:
            if moment == "before the start":
                asyncio.run_coroutine_threadsafe(stop(), loop).result()
            return run(endpoint, body, seconds)

        def start_suspended(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
            started = popen(*arguments, **options)
            started.send_signal(signal.SIGSTOP)  # It never replies.
            if moment == "during the start":
                asyncio.run_coroutine_threadsafe(stop(), loop).result()
            return started

        monkeypatch.setattr(process, "run", stop_and_run)
        monkeypatch.setattr("chairlift.system.child_process.subprocess.Popen", start_suspended)
        with pytest.raises(EngineDeadError, match="stopped"):
            await asyncio.wait_for(workers.run("a", "/detokenize", b'{"tokens": [3]}'), AMPLE_SECONDS)

    run_alone(setup[1], scenario)


def test_a_call_that_is_cancelled_after_the_pool_was_stopped_stays_cancelled(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        running, waiting = (asyncio.ensure_future(workers.run("a", "/detokenize", b"{}")) for _ in range(2))
        await asyncio.sleep(0)
        workers.stop(EngineDeadError("stopped"))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(EngineDeadError, match="stopped"):
            await running

    run_alone(setup[1], scenario)


def test_disconnecting_ends_the_work_for_a_request(
    server: RunningServer, workers: PreparationWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_max_seconds", 600.0)  # The stopped worker is not killed after a timeout.
    body = json.dumps({"tokens": [3]}).encode() + PADDING
    assert post(server, "/detokenize", body).status_code == 200
    pid = workers.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    connection = server.connect()
    headers = [
        "POST /detokenize HTTP/1.1",
        "Host: localhost",
        "Authorization: Bearer ops-secret",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    connection.sendall("\r\n".join([*headers, "", ""]).encode() + body)
    wait_for(lambda: not workers._free)
    connection.close()
    assert post(server, "/detokenize", body).status_code == 200, "the stopped worker does not block the queue"


def test_a_failed_start_of_a_worker_is_reported_and_repeated(setup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr("chairlift.system.child_process.subprocess.Popen", fail)
            with pytest.raises(OverloadedError, match="Too many open files"):
                await workers.run("a", "/detokenize", b'{"tokens": [3]}')
        assert isinstance(await workers.run("a", "/detokenize", b'{"tokens": [3]}'), PreparedRequest)

    run_alone(setup[1], scenario)


def test_a_worker_fails_if_the_files_of_the_model_have_changed(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        with pytest.raises(OverloadedError, match="has changed since the server was started") as failure:
            await workers.run("a", "/detokenize", b'{"tokens": [3]}')
        assert failure.value.code == "preparation_failed"
        assert re.fullmatch(
            r"the request could not be prepared: the server's log has the reason \(failure \w{8}\); send it again, .*",
            failure.value.text(is_admin=False),
        )

    run_alone(replace(setup[1], fingerprint="other"), scenario)


def test_a_worker_that_does_not_read_is_killed_after_the_timeout(setup: Any) -> None:
    async def scenario(workers: PreparationWorkers) -> None:
        await workers.run("a", "/detokenize", b'{"tokens": [3]}')
        pid = workers.processes[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        workers._max_seconds = 0.3
        with pytest.raises(RequestError, match="took more than"):
            await workers.run("a", "/detokenize", b" " * 1_000_000)  # More than the buffer of a pipe.

    run_alone(setup[1], scenario)


def test_large_bodies_need_the_content_type_of_json(server: RunningServer) -> None:
    for headers in ({"Content-Type": "text/plain"}, {}):
        headers["Authorization"] = "Bearer ops-secret"
        answer = httpx.post(f"{server.url}/v1/completions", content=b"[" * 100_000, headers=headers, verify=NO_TLS)
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
