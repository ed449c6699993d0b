"""CORS: preflight requests, and the headers that let a page read a response."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.errors import ConfigError
from chairlift.server.access.access_options import AccessOptions, ServerLimits, parse_origins
from chairlift.server.access.keys import Key, KeyRing, digest
from support.command_runner import invoke
from support.plain_http import NO_TLS
from support.running_server import RunningServer, run_server
from support.waiting import wait_for

PAGE = "https://app.example.com"
FOREIGN = "https://evil.example.com"
KEY, LIMITED_KEY = "sk-of-the-page", "sk-of-the-limited"
COMPLETION = {"prompt": [3, 4], "max_tokens": 3, "ignore_eos": True}
PATH = "/v1/completions"


def serve(folder: Path, **options: Any) -> Any:
    llm = AsyncLLM(model=str(folder), num_kv_blocks=60, skip_tokenizer_init=True, num_threads=1)
    return run_server(llm, "tiny", **options)


@pytest.fixture(scope="module")
def guarded(tiny_model_dir: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that the page may call, with two keys, one of which is limited to one request per minute."""
    keys = KeyRing([Key("page", digest(KEY)), Key("limited", digest(LIMITED_KEY), requests_per_minute=1)])
    log = tmp_path_factory.mktemp("log") / "access.jsonl"
    options = {"limits": ServerLimits(max_body_bytes=2048), "access_log": log}
    with serve(tiny_model_dir("llama"), keys=keys, allowed_origins=(PAGE,), **options) as running:
        yield running


def call(
    server: RunningServer, method: str = "POST", path: str = PATH, *, origin: str = PAGE, key: str = KEY, **more: Any
) -> httpx.Response:
    headers = {"Origin": origin, "Authorization": f"Bearer {key}", **more.pop("headers", {})}
    return httpx.request(method, server.url + path, headers=headers, verify=NO_TLS, **more)


def preflight(server: RunningServer, origin: str = PAGE, method: str = "POST", path: str = PATH) -> httpx.Response:
    """Send a preflight request like a browser for OpenAI's client, which contains no key."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return httpx.options(server.url + path, headers=headers, verify=NO_TLS)


def is_readable(answer: httpx.Response) -> bool:
    """Whether a browser lets the page read the response."""
    return answer.headers.get("access-control-allow-origin") == PAGE and "Origin" in answer.headers["vary"]


def logged(server: RunningServer, answer: httpx.Response) -> dict[str, Any]:
    """The line of a call in the access log, once it is written."""

    def lines() -> list[dict[str, Any]]:
        return [line for line in server.logged_calls() if line.get("request_id") == answer.headers["x-request-id"]]

    wait_for(lambda: bool(lines()))
    (line,) = lines()
    assert (line["path"], line["status"]) == (PATH, answer.status_code)
    return line


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models"])
def test_a_preflight_needs_no_key(guarded: RunningServer, path: str) -> None:
    answer = preflight(guarded, path=path)
    assert answer.status_code == 200
    assert is_readable(answer)
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert "access-control-allow-credentials" not in answer.headers


def test_preflights_count_against_no_limit(guarded: RunningServer) -> None:
    before = guarded.admission.num_calls
    assert [preflight(guarded).status_code for _ in range(5)] == [200] * 5
    first, second = (call(guarded, json=COMPLETION, key=LIMITED_KEY) for _ in range(2))
    assert first.status_code == 200
    assert second.status_code == 429
    assert is_readable(second)
    assert "Retry-After" in second.headers["access-control-expose-headers"]
    assert float(second.headers["retry-after"]) > 0
    wait_for(lambda: guarded.admission.num_calls == before)  # A call ends after its response.


@pytest.mark.parametrize(
    ("status", "method", "path", "more"),
    [
        (200, "GET", "/v1/models", {}),
        (200, "GET", "/health", {"key": "none"}),
        (401, "POST", PATH, {"json": COMPLETION, "key": "wrong"}),
        (400, "POST", PATH, {"json": {**COMPLETION, "typo": 1}}),
        (400, "POST", "/v1/messages", {"json": {"typo": 1}}),
        (404, "POST", "/v1/audio/speech", {"json": {}}),
        (404, "POST", PATH, {"json": {**COMPLETION, "model": "another"}}),
        (405, "GET", PATH, {}),
        (413, "POST", PATH, {"content": b"x" * 4096}),
    ],
)
def test_a_page_can_read_every_response(
    guarded: RunningServer, status: int, method: str, path: str, more: dict[str, Any]
) -> None:
    answer = call(guarded, method, path, **more)
    assert answer.status_code == status
    assert is_readable(answer)
    assert call(guarded, method, path, origin=FOREIGN, **more).headers.get("access-control-allow-origin") is None


def test_an_unexpected_error_can_be_read_and_is_logged(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(guarded.admission, "open_call", breaks)
    answer = call(guarded, json=COMPLETION)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "internal_server_error"
    assert is_readable(answer)
    assert logged(guarded, answer)["key"] == "page"


def test_a_stream_can_be_read(guarded: RunningServer) -> None:
    answer = call(guarded, json={**COMPLETION, "stream": True})
    assert is_readable(answer)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "request-id"} <= {*exposed} & answer.headers.keys()


def test_a_preflight_of_another_page_is_rejected_and_logged(guarded: RunningServer) -> None:
    answer = preflight(guarded, FOREIGN)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    assert logged(guarded, answer)["method"] == "OPTIONS"


def test_by_default_no_page_may_call(tiny_server: RunningServer) -> None:
    assert preflight(tiny_server).status_code == 405
    answer = call(tiny_server, json=COMPLETION)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_body_that_needs_no_preflight_is_rejected(tiny_server: RunningServer) -> None:
    """Browsers send such a body from any page, without a preflight request."""
    answer = call(tiny_server, content=json.dumps(COMPLETION), headers={"Content-Type": "text/plain"}, origin=FOREIGN)
    assert answer.status_code == 400


def test_an_asterisk_allows_every_page(tiny_model_dir: Callable[..., Path]) -> None:
    with serve(tiny_model_dir("llama"), allowed_origins=("*",)) as server:
        assert preflight(server, FOREIGN).headers["access-control-allow-origin"] == "*"
        assert call(server, json=COMPLETION, origin=FOREIGN).headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("origin", ["http://localhost:3000", "tauri://localhost", "http://[::1]:8080", "null", "*"])
def test_origins_that_browsers_send_are_valid(origin: str) -> None:
    assert parse_origins([origin]) == (origin,)


def test_the_origins_of_a_tuple_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"'https://a\.example/' is not an origin"):
        AccessOptions(allowed_origins=("https://a.example/",))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            ["--allowed-origins", "https://a.example"],
            """allowed_origins must be a JSON list of strings such as '["*"]'""",
        ),
        (["--allowed-origins", '"*"'], "allowed_origins must be a JSON list"),
        (["--allowed-origins", '["https://a.example/"]'], "'https://a.example/' is not an origin; write"),
        (["--allowed-origins", '["https://A.example"]'], "is not an origin"),
        (["--allowed-origins", '["localhost:3000"]'], "is not an origin"),
        (["--allowed-origins", '["https://a b"]'], "is not an origin"),
    ],
)
def test_errors_name_the_option(options: list[str], match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "chairlift.engine.process.process_client.ProcessClient.__init__", lambda *_, **__: pytest.fail("loads")
    )
    error = invoke(["serve", *options]).exception
    assert isinstance(error, ConfigError)
    assert match in str(error)


def test_the_command_passes_the_lists_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("chairlift.server.serve.run", lambda options, *_: given.append(options.access))
    result = invoke(["serve", "--allowed-origins", json.dumps([PAGE])])
    assert result.exception is None
    (access,) = given
    assert access.allowed_origins == (PAGE,)
