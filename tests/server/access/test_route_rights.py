"""Every route is declared with the right that it needs and with what bounds its work; a new one fails until it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from declared_routes import ADMINS, COUNTED, PUBLIC, READS, routes_of

from chairlift import AsyncLLM
from chairlift.server.access.keys import KeyRing, key_record, parse_key
from support.operations import count_operations
from support.running_server import RunningServer, completion_body, run_server
from support.waiting import AMPLE_SECONDS

ADMIN, PLAIN, SPENT = "sk-admin-admin-admin", "sk-plain-plain-plain", "sk-spent-spent-spent"


@pytest.fixture(scope="module")
def server(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    secrets = {"admin": ADMIN, "plain": PLAIN, "spent": SPENT}
    records = {name: key_record(secret, name=name, admin=name == "admin") for name, secret in secrets.items()}
    records["spent"]["requests_per_minute"] = 1
    keys = KeyRing(parse_key(record, name) for name, record in records.items())
    with run_server(tiny_llm(num_kv_blocks=20), "tiny", keys=keys, page_control=True) as running:
        assert running.post("/v1/completions", completion_body(1), SPENT).status_code == 200
        yield running


def routes(server: RunningServer) -> dict[str, str]:
    return routes_of(server.uvicorn.config.app)


def call(server: RunningServer, path: str, key: str | None, body: bytes = b"{") -> int:
    method = routes(server)[path]
    url = server.url + path.replace("{model:path}", "tiny").replace("{request_id}", "unknown")
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return httpx.request(
        method, url, headers=headers, content=body if method == "POST" else None, timeout=AMPLE_SECONDS
    ).status_code


def test_every_route_is_declared_once(server: RunningServer) -> None:
    declared = [*PUBLIC, *READS, *ADMINS, *COUNTED]
    assert sorted(declared) == sorted({*declared})
    assert {*routes(server)} <= {*declared}
    assert {*READS, *ADMINS, *COUNTED} <= {*routes(server)}


def test_routes_reject_calls_before_their_bodies_are_read(server: RunningServer) -> None:
    answered = {path for path in routes(server) if "*" not in path and call(server, path, None) != 401}
    assert answered <= PUBLIC
    assert {path: call(server, path, PLAIN) for path in ADMINS} == dict.fromkeys(ADMINS, 403)
    assert {path: call(server, path, SPENT) for path in COUNTED} == dict.fromkeys(COUNTED, 429)


async def call_in_process(app: Any, method: str, path: str, key: str | None, body: bytes) -> int:
    """The status of a call without a socket."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({**scope, "scheme": "http", "http_version": "1.1"}, receive, send)
    return statuses[0]


@pytest.mark.parametrize(
    ("paths", "key", "status"), [(COUNTED | ADMINS, None, 401), (ADMINS, PLAIN, 403), (COUNTED, SPENT, 429)]
)
def test_the_cost_of_a_rejected_call_does_not_depend_on_its_body(
    server: RunningServer, paths: set[str], key: str | None, status: int
) -> None:
    app = server.uvicorn.config.app

    def cost(path: str, num_tokens: int) -> int:
        body = b'{"prompt":[%b]}' % b",".join([b"5"] * num_tokens)
        statuses: list[int] = []
        call = partial(call_in_process, app, routes(server)[path], path, key, body)
        count = count_operations(lambda: statuses.append(asyncio.run(call())))
        assert statuses == [status], path
        return count

    costs = {path: (cost(path, 1), cost(path, 1), cost(path, 10_000)) for path in paths}
    assert {path: large for path, (_, small, large) in costs.items() if large > 1.1 * small} == {}


def test_only_admins_see_the_folder_of_a_model(server: RunningServer, tiny_model_dir: Callable[..., Path]) -> None:
    def roots(key: str) -> list[Any]:
        names = {"/v1/models/tiny": "root", "/server_info": "model_path", "/model_info": "tokenizer_path"}
        headers = {"Authorization": f"Bearer {key}"}
        return [httpx.get(server.url + path, headers=headers).json()[name] for path, name in names.items()]

    assert roots(ADMIN) == [str(tiny_model_dir("llama").resolve())] * 3
    assert roots(PLAIN) == [None] * 3


def test_head_has_the_status_and_headers_of_get(server: RunningServer) -> None:
    paths = [path for path, method in routes(server).items() if method == "GET"] + ["/docs/redoc.js", "/v1/nothing"]
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=AMPLE_SECONDS) as client:
        for path in paths:
            given = path.replace("{model:path}", "tiny").replace("{request_id}", "unknown").replace("*", "unknown.js")
            with client.stream("GET", given) as expected:
                head = client.head(given)
            assert (head.status_code, head.content) == (expected.status_code, b""), path
            assert head.headers.get("content-type") == expected.headers.get("content-type"), path
    server.wait_until_idle()
