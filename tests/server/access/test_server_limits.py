"""Limits on real sockets: keys, queue, deadlines, bodies and slow clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from chairlift import AsyncLLM
from chairlift.server.access.access_options import ServerLimits
from chairlift.server.access.keys import Key, KeyRing, digest
from chairlift.server.http import http_protocol
from support.running_server import RunningServer, completion_body, run_server, until_closed
from support.waiting import AMPLE_SECONDS, wait_for

KEYS = KeyRing(
    [
        Key("ops", digest("ops-secret"), is_admin=True),
        Key("alice", digest("alice-secret"), max_concurrent=2),
        Key("bob", digest("bob-secret"), requests_per_minute=3),
        Key("carol", digest("carol-secret"), requests_per_minute=3),
        Key("dave", digest("dave-secret"), requests_per_minute=3),
    ]
)
QUICK = ServerLimits(max_queued_requests=3, max_body_bytes=50_000)


@pytest.fixture(scope="module")
def guarded(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    """One seat, keys, and limits that are reached soon."""
    with run_server(tiny_llm(max_num_seqs=1), "tiny", keys=KEYS, limits=QUICK) as running:
        running.slow_down(0.005)
        yield running


@pytest.fixture
def server(guarded: RunningServer) -> Iterator[RunningServer]:
    yield guarded
    guarded.wait_until_idle()
    wait_for(lambda: guarded.admission.num_calls == guarded.admission.num_queued_requests == 0)


def test_without_a_key_there_is_a_401_in_the_form_of_the_path(server: RunningServer) -> None:
    for headers in ({}, {"Authorization": "Basic abc"}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}):
        for path in ("/v1/completions", "/v1/models", "/v1/page", "/v1/engine"):
            method = "POST" if path.endswith("completions") else "GET"
            answer = httpx.request(method, f"{server.url}{path}", headers=headers, json=completion_body(1))
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.headers["x-request-id"] == answer.headers["request-id"]
    answer = httpx.post(f"{server.url}/v1/messages", json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    answer = httpx.get(f"{server.url}/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "authentication_error")
    with pytest.raises(openai.AuthenticationError, match="not known to this server"):
        server.client("unknown").models.list()


def test_admin_keys_give_access_to_the_engine_and_other_keys_do_not(server: RunningServer) -> None:
    assert server.client("alice-secret").models.list().data[0].id == "tiny"
    with_header = httpx.get(f"{server.url}/v1/models", headers={"x-api-key": "bob-secret"})
    assert with_header.status_code == 200
    for secret, status in (("ops-secret", 200), ("alice-secret", 403)):
        answer = httpx.get(f"{server.url}/v1/engine", headers={"Authorization": f"Bearer {secret}"})
        assert answer.status_code == status


def test_requests_beyond_the_rate_limit_of_a_key_are_rejected(server: RunningServer) -> None:
    answers = [server.post("/v1/completions", completion_body(2), "bob-secret") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 20
    assert server.post("/v1/completions", completion_body(2), "ops-secret").status_code == 200
    too_much = server.post("/v1/completions", completion_body(2, prompt=[9999]), "bob-secret")
    assert too_much.status_code == 429, "the limit is checked before the prompt"


def test_utility_calls_count_as_requests(server: RunningServer) -> None:
    message = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    bodies = {"/tokenize": {"prompt": "x"}, "/detokenize": {"tokens": [1]}, "/v1/messages/count_tokens": message}
    first = [server.post(path, body, "carol-secret") for path, body in bodies.items()]
    assert all(answer.status_code in (200, 400) for answer in first), "there is no tokenizer"
    for path, body in bodies.items():
        answer = server.post(path, body, "carol-secret")
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


def test_explanations_count_as_requests_except_with_an_admin_key(server: RunningServer) -> None:
    call_id = server.post("/v1/completions", completion_body(2), "dave-secret").json()["id"]

    def explain(secret: str) -> httpx.Response:
        path = f"{server.url}/v1/requests/{call_id}/explain"
        return httpx.get(path, headers={"Authorization": f"Bearer {secret}"})

    assert [explain("dave-secret").status_code for _ in range(3)] == [200, 200, 429]
    assert "requests_per_minute=3" in explain("dave-secret").json()["error"]["message"]
    assert [explain("ops-secret").status_code for _ in range(4)] == [200] * 4


def test_prefixes_are_not_found_across_keys_or_salts(server: RunningServer) -> None:
    prompt = list(range(100, 164))

    def cached(secret: str, **fields: Any) -> int:
        answer = server.post("/v1/completions", completion_body(1, prompt=prompt, **fields), secret).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("ops-secret") == 0
    assert cached("ops-secret") == 48
    assert cached("alice-secret") == 0
    assert cached("alice-secret", cache_salt="x") == 0
    assert cached("alice-secret", cache_salt="x") == 48
    assert cached("alice-secret") == 48
    assert cached("ops-secret", cache_salt="x") == 0


def test_the_reason_of_a_miss_tells_nothing_of_the_prompts_of_others(server: RunningServer) -> None:
    rest = list(range(150, 86, -1))

    def miss(secret: str, prompt: list[int], **fields: Any) -> dict[str, Any] | None:
        answer = server.post("/v1/completions", completion_body(1, prompt=prompt, **fields), secret).json()
        miss: dict[str, Any] | None = answer["usage"]["prompt_tokens_details"].get("cache_miss")
        return miss

    never_seen = {"reason": "never_seen"}
    assert miss("ops-secret", [1, *rest]) == never_seen
    assert miss("ops-secret", [1, *rest]) is None
    assert miss("ops-secret", [2, *rest]) == {"reason": "differs", "token": 0, "text": ""}, "there is no tokenizer"
    assert miss("alice-secret", [1, *rest]) == never_seen
    assert miss("alice-secret", [2, *rest], cache_salt="y") == never_seen
    assert miss("ops-secret", [3, *rest], cache_salt="y") == never_seen


def test_a_full_queue_rejects_calls_with_retry_after(server: RunningServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        with server.hold_steps():
            calls = [pool.submit(server.post, "/v1/completions", completion_body(40), "ops-secret") for _ in range(8)]
            wait_for(lambda: any(call.done() for call in calls))
        answers = [call.result() for call in calls]
    rejected = [answer for answer in answers if answer.status_code == 429]
    assert rejected
    assert all(answer.status_code in (200, 429) for answer in answers)
    assert all(answer.json()["error"]["code"] == "queue_full" for answer in rejected)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in rejected)


def test_a_deadline_ends_calls_and_streams_with_an_error(server: RunningServer) -> None:
    late = server.post("/v1/completions", completion_body(200, timeout=0.2), "ops-secret")
    assert late.status_code == 408, late.text
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert late.headers["x-should-retry"] == "false"
    gate, scheduler = server.hold_steps(), server.llm.engine.core.scheduler
    gate.allow(2)
    with (
        gate,
        httpx.stream(
            "POST",
            f"{server.url}/v1/completions",
            json=completion_body(200, timeout=100, stream=True, logprobs=0),
            headers={"Authorization": "Bearer ops-secret"},
        ) as stream,
    ):
        lines = stream.iter_lines()
        assert "token_logprobs" in next(lines)
        (request,) = scheduler.unfinished.values()
        request.deadline = request.arrival_time + 0.2  # A shorter one could pass before the first output.
        scheduler._deadlines.add(request)
        gate.open()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "0.2 s passed" in events[-1]["error"]["message"]
    assert server.post("/v1/completions", completion_body(5, timeout=100), "ops-secret").status_code == 200


def test_a_deadline_holds_while_the_engine_hangs(server: RunningServer) -> None:
    executor = server.llm.engine.core._executor
    submit = executor.submit
    hangs, may_continue = threading.Event(), threading.Event()

    def hang(plan: Any) -> Any:
        executor.submit = submit
        hangs.set()
        may_continue.wait(AMPLE_SECONDS)
        return submit(plan)

    executor.submit = hang
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(server.post, "/v1/completions", completion_body(5), "ops-secret")
        assert hangs.wait(AMPLE_SECONDS)
        answer = server.post("/v1/completions", completion_body(5, timeout=0.3), "ops-secret")
        may_continue.set()
    assert answer.status_code == 408
    assert "the engine does not respond" in answer.json()["error"]["message"]
    assert call.result().status_code == 200


def test_setting_the_clock_of_the_machine_changes_no_limit_or_deadline(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time
    for jump in (86_400.0, -86_400.0):
        answers: list[httpx.Response] = []
        call = threading.Thread(
            target=lambda into: into.append(
                server.post("/v1/completions", completion_body(60, timeout=100), "ops-secret")
            ),
            args=(answers,),
        )
        call.start()
        for _ in range(4):
            server.post("/v1/completions", completion_body(2), "bob-secret")  # more than a minute allows
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        call.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 60
        assert server.post("/v1/completions", completion_body(2), "bob-secret").status_code == 429


def test_bodies_are_bounded_before_they_are_parsed(server: RunningServer) -> None:
    headers = {"Authorization": "Bearer ops-secret", "Content-Type": "application/json"}

    def post(content: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)

    assert post(b"x" * 50_001).status_code == 413
    assert post(iter([b" " * 30_000, b" " * 30_000])).status_code == 413
    deep = post(b'{"prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}")
    assert deep.status_code == 400
    assert "recursion limit exceeded" in deep.json()["error"]["message"]
    assert post(b'{"prompt": "' + b"[" * 20_000 + b'"}').json()["error"]["message"].count("recursion") == 0
    for length, status in ((b"9" * 17, b" 413 "), (b"9" * 40, b" 400 ")):
        with server.connect() as connection:
            connection.sendall(HALF.replace(b"1000", length))
            assert status in connection.recv(65536)


HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ops-secret\r\n"
    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHo", HALF, HALF + b'{"prompt": [1'])
def test_clients_that_send_nothing_more_cost_only_their_connections(server: RunningServer, sent: bytes) -> None:
    before = set(server.uvicorn.server_state.connections)
    with ExitStack() as connections:
        for _ in range(200):
            connections.enter_context(server.connect()).sendall(sent)
        assert server.post("/v1/completions", completion_body(3), "ops-secret").status_code == 200
        wait_for(lambda: server.admission.num_calls == 0)
    wait_for(lambda: server.uvicorn.server_state.connections <= before)


def test_the_connection_of_a_client_that_stops_reading_is_closed_and_its_request_aborted(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "WRITE_SECONDS", 0.2)
    before = set(server.uvicorn.server_state.connections)
    connection = server.connect(receive_buffer=4096)
    wait_for(lambda: bool(server.uvicorn.server_state.connections - before))
    (protocol,) = server.uvicorn.server_state.connections - before
    protocol.transport.set_write_buffer_limits(high=4096)  # The whole answer would fit in the default.
    protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    # Three answers, which may wait at a time, exceed the buffers of the connection also if their deltas are added up.
    content = json.dumps(completion_body(250, prompt=[3, 4], stream=True, logprobs=20, n=3)).encode()
    with server.hold_steps():
        connection.sendall(HALF.replace(b"1000", str(len(content)).encode()) + content)
        wait_for(lambda: server.llm.num_unfinished == 1)
    wait_for(lambda: server.llm.num_unfinished == 0)
    wait_for(lambda: server.admission.num_calls == 0)
    wait_for(lambda: protocol not in server.uvicorn.server_state.connections)
    received = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received


def test_a_client_that_reads_slowly_receives_everything(server: RunningServer) -> None:
    connection = server.connect(receive_buffer=4096)
    content = json.dumps(completion_body(100, prompt=[3, 4], stream=True, logprobs=5)).encode()
    connection.sendall(HALF.replace(b"1000", str(len(content)).encode()) + content)
    received = b""
    while b"[DONE]" not in received:
        chunk = connection.recv(4096)
        assert chunk
        received += chunk
        time.sleep(0.004)
    connection.close()
