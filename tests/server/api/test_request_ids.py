"""Request ids that clients choose: the permitted characters, and that log and path contain each id."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from chairlift.errors import RequestError
from chairlift.server.api.routes import ENDPOINTS, parse_json
from chairlift.server.telemetry.call_log import CallLogMiddleware
from support.case_loop import loop_over
from support.plain_http import NO_TLS
from support.running_server import RunningServer
from support.waiting import wait_for

MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1, "store": False}),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 1}),
]
BODIES = {endpoint.path: endpoint.body for endpoint in ENDPOINTS}
ENDS = ("\nb", "\n", "\r", "\x1b[2J", "\x00", " b", "/b", "?b", "%41", "\u2028b")
UNSAFE = (*(f"a{end}" for end in ENDS), "é", "x" * 129, ".", "..", "...")
SAFE = ("story-1", "a.b_c~d", "2026-11-21T20:00:00", "x" * 128, "..a", ".-.", "k=v;(a,b)+!$&'*@")


def parsed_id(path: str, body: dict[str, Any], request_id: str) -> str | None:
    return parse_json(BODIES[path], json.dumps({**body, "request_id": request_id}).encode()).request_id


@loop_over(("path", "body"), CALLS)
@loop_over("wrong", UNSAFE)
def test_ids_that_are_unsafe_in_logs_or_paths_are_rejected(path: str, body: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RequestError, match=r"^request_id must ") as caught:
        parsed_id(path, body, wrong)
    assert str(caught.value).isprintable()


@loop_over(("path", "body"), CALLS)
@loop_over("chosen", SAFE)
def test_other_ids_are_accepted(path: str, body: dict[str, Any], chosen: str) -> None:
    assert parsed_id(path, body, chosen) == chosen


@loop_over(("path", "body", "chosen"), [(*each, SAFE[-i]) for i, each in enumerate(CALLS, start=1)])
def test_ids_are_found_in_log_and_path(api_server: RunningServer, path: str, body: dict[str, Any], chosen: str) -> None:
    answer = api_server.post(path, {**body, "request_id": chosen})
    assert answer.status_code == 200
    assert answer.json()["id"].endswith(chosen)
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == answer.json()["id"]
    found = httpx.get(f"{api_server.url}/v1/requests/{answer.json()['id']}", verify=NO_TLS)
    assert found.status_code == 200
    wait_for_line(api_server, answer.json()["id"])


@loop_over(("path", "body"), CALLS)
def test_the_id_of_a_header_is_used_unless_the_body_has_one(
    api_server: RunningServer, path: str, body: dict[str, Any]
) -> None:
    headers = {"X-Request-Id": "of-a-proxy"}
    ids = []
    for fields in ({}, {"request_id": "of-the-body"}, {"stream": True}):
        answer = httpx.post(api_server.url + path, json={**body, **fields}, headers=headers, verify=NO_TLS)
        assert answer.status_code == 200
        ids.append(answer.headers["x-request-id"])
        assert answer.headers.get_list("x-request-id") == answer.headers.get_list("request-id") == ids[-1:]
    prefix = ids[0].removesuffix("of-a-proxy")
    assert ids == [prefix + "of-a-proxy", prefix + "of-the-body", prefix + "of-a-proxy"]
    assert prefix != ids[0]
    wait_for_line(api_server, ids[0])


@loop_over(("path", "body"), CALLS)
def test_calls_in_progress_may_have_the_same_header(api_server: RunningServer, path: str, body: dict[str, Any]) -> None:
    headers = {"X-Request-Id": "of-a-mesh"}

    def send(**fields: Any) -> httpx.Response:
        return httpx.post(api_server.url + path, json=body | fields, headers=headers, timeout=None, verify=NO_TLS)

    with ThreadPoolExecutor(3) as pool, api_server.hold_steps():
        first = pool.submit(send)
        wait_for(lambda: api_server.llm.num_unfinished == 1)
        others = [pool.submit(send), pool.submit(send, stream=True)]
        wait_for(lambda: api_server.llm.num_unfinished == 3)
        rejected = send(request_id="of-a-mesh")
    answers = [each.result() for each in (first, *others)]
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert ids[0].endswith("of-a-mesh")
    assert len(set(ids)) == 3
    assert ids[2] in answers[2].text
    for call_id in ids:
        assert httpx.get(f"{api_server.url}/v1/requests/{call_id}", verify=NO_TLS).status_code == 200
        wait_for_line(api_server, call_id)
    assert rejected.status_code == 400, "the id of a body must be unique"
    assert "in use" in rejected.json()["error"]["message"]


def test_a_header_may_be_the_id_of_a_prompt_in_progress(api_server: RunningServer) -> None:
    path, body = CALLS[0]
    with ThreadPoolExecutor(2) as pool, api_server.hold_steps():
        first = pool.submit(api_server.post, path, {**body, "prompt": ["a", "b"], "request_id": "list"})
        wait_for(lambda: api_server.llm.num_unfinished == 2)
        headers = {"X-Request-Id": "list.1"}
        second = pool.submit(httpx.post, api_server.url + path, json=body, headers=headers, verify=NO_TLS)
        wait_for(lambda: second.done() or api_server.llm.num_unfinished == 3)
    assert [first.result().status_code, second.result().status_code] == [200, 200]


def opened_id(given: str) -> str:
    """The id of a call whose header `X-Request-Id` has a value, in the headers of its response."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({})(scope, receive, send)

    async def call() -> str:
        transport = httpx.ASGITransport(CallLogMiddleware(app, lambda _call_id: [], []))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.get("/v1/models", headers={"X-Request-Id": given.encode("latin-1")})
        return answer.headers["x-request-id"]

    return asyncio.run(call())


@loop_over("given", ["a b", "a/b", "\xe9", "x" * 129, "..", ""])
def test_an_unsafe_id_of_a_header_is_not_used(given: str) -> None:
    assert re.fullmatch("[0-9a-f]{32}", opened_id(given))


@loop_over("given", SAFE)
def test_a_safe_id_of_a_header_is_used(given: str) -> None:
    assert opened_id(given) == given


def test_errors_have_an_id_that_is_in_the_log(api_server: RunningServer) -> None:
    path, headers = f"{api_server.url}/v1/completions", {"Content-Type": "application/json"}
    answers = {
        400: httpx.post(path, content=b"{", headers=headers, verify=NO_TLS),
        404: httpx.get(path + "/none", verify=NO_TLS),
        405: httpx.get(path, verify=NO_TLS),
        413: httpx.post(path, content=b" " * (1 << 24), headers=headers, verify=NO_TLS),
    }
    ids = {answer.headers["x-request-id"] for answer in answers.values()}
    assert [answer.status_code for answer in answers.values()] == list(answers)
    assert len(ids) == len(answers), "each has an id of its own"
    assert ids == {answer.headers["request-id"] for answer in answers.values()}
    for call_id in ids:
        wait_for_line(api_server, call_id)
    chosen = httpx.get(path, headers={"X-Request-Id": "of-a-proxy"}, verify=NO_TLS)
    assert (chosen.status_code, chosen.headers["x-request-id"]) == (405, "of-a-proxy")


def wait_for_line(server: RunningServer, call_id: str) -> None:
    """Wait for the line of a call in the access log."""
    wait_for(lambda: call_id in [line.get("request_id") for line in server.logged_calls()])
