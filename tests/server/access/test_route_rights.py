"""Every route is declared with the right that it needs and with what bounds its work; a new one fails until it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import httpx
import pytest
from starlette.routing import BaseRoute, Mount, Route

from chairlift import AsyncLLM
from chairlift.lab.bench.static_comparison import simulate_static_batching
from chairlift.server.access.keys import KeyRing, key_record, parse_key
from chairlift.server.web.page_options import PageOptions
from running_server import RunningServer, completion_body, run_server

ADMIN, PLAIN, SPENT = "sk-admin-admin-admin", "sk-plain-plain-plain", "sk-spent-spent-spent"

PUBLIC: Final = {"/health", "/ready", "/metrics", "/", "/chat", "/docs", "/openapi.json", "/docs/*", "/page/*"}
"""No key: constant work, and nothing about requests."""

READS: Final = {
    "/v1/models",
    "/v1/models/{model:path}",
    "/v1/requests",
    "/v1/requests/{request_id}",
    "/v1/page",
    "/tokenizer_info",
    "/v1/page/events",
}
"""Any key: work proportional to what the server keeps anyway. The streams of a key are limited."""

ADMINS: Final = {
    "/v1/engine",
    "/v1/events",
    "/models/changes",
    "/models/load",
    "/models/unload",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
"""Admin keys only."""

COUNTED: Final = {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/rerank",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
    "/v1/requests/{request_id}/explain",
    "/v1/page/burst",
    "/v1/page/simulation",
}
"""Any key: counts as a request of the key before its body is read."""


@pytest.fixture(scope="module")
def server(tiny_model_dir: Callable[..., Path]) -> Iterator[RunningServer]:
    secrets = {"admin": ADMIN, "plain": PLAIN, "spent": SPENT}
    records = {name: key_record(secret, name=name, admin=name == "admin") for name, secret in secrets.items()}
    records["spent"]["requests_per_minute"] = 1
    keys = KeyRing(parse_key(record, name) for name, record in records.items())
    llm = AsyncLLM(model=str(tiny_model_dir("llama")), num_kv_blocks=20, skip_tokenizer_init=True, num_threads=1)
    pages = PageOptions(page_control=True, simulate_static=simulate_static_batching)
    with run_server(llm, "tiny", keys=keys, pages=pages) as running:
        assert running.post("/v1/completions", completion_body(1), SPENT).status_code == 200
        yield running


def walk(routes: Iterable[BaseRoute]) -> Iterator[Mount | Route]:
    for route in routes:
        if isinstance(route, Mount | Route):
            yield route
        else:  # FastAPI's record of an included router
            yield from walk(route.original_router.routes)  # type: ignore[attr-defined]


def routes(server: RunningServer) -> dict[str, str]:
    """The paths of all routes with the method that a test calls."""
    found = {}
    for route in walk(server.uvicorn.config.app.routes):  # type: ignore[union-attr]
        if isinstance(route, Mount):
            found[f"{route.path}/*"] = "GET"
        else:
            found[route.path] = "POST" if "POST" in (route.methods or ()) else "GET"
    return found


def call(server: RunningServer, path: str, key: str | None, body: bytes = b"{") -> int:
    method = routes(server)[path]
    url = server.url + path.replace("{model:path}", "tiny").replace("{request_id}", "unknown")
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    return httpx.request(
        method, url, headers=headers, content=body if method == "POST" else None, timeout=20
    ).status_code


def test_every_route_is_declared_once(server: RunningServer) -> None:
    declared = [*PUBLIC, *READS, *ADMINS, *COUNTED]
    assert sorted(declared) == sorted({*declared})
    assert {*routes(server)} <= {*declared}
    assert {*READS, *ADMINS, *COUNTED} <= {*routes(server)}


def test_no_route_but_the_public_ones_answers_without_a_key(server: RunningServer) -> None:
    answered = {path for path in routes(server) if "*" not in path and call(server, path, None) != 401}
    assert answered <= PUBLIC


def test_routes_of_admins_reject_other_keys_before_they_read_the_body(server: RunningServer) -> None:
    assert {path: call(server, path, PLAIN) for path in ADMINS} == dict.fromkeys(ADMINS, 403)


def test_a_key_without_requests_left_is_rejected_before_its_body_is_parsed(server: RunningServer) -> None:
    assert {path: call(server, path, SPENT) for path in COUNTED} == dict.fromkeys(COUNTED, 429)
