"""Tests the pages and the data of the live page, on a running server and of a recorded event log."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from starlette.testclient import TestClient

from chairlift import AsyncLLM
from chairlift.errors import ConfigError, OverloadedError
from chairlift.events import EngineStarted
from chairlift.sampling_params import SamplingParams
from chairlift.server.access.admission import MAX_EVENT_STREAMS, Permit
from chairlift.server.access.keys import KeyRing, key_record, parse_key
from chairlift.server.serve_options import parse_root_path
from chairlift.server.web.burst import BurstSizes, start_burst
from chairlift.server.web.page_bodies import BurstBody
from chairlift.server.web.page_language import Language
from chairlift.server.web.recorded_log import page_app, recorded_log_app
from support.recorded_logs import recorded_log
from support.running_server import RunningServer, completion_body, run_server
from support.waiting import wait_for

ADMIN, OWN, OTHER = "sk-admin-admin-admin", "sk-own-own-own-own-own", "sk-other-other-other-other"


def make_keys(admin: str = ADMIN) -> KeyRing:
    secrets = {"admin": admin, "own": OWN, "other": OTHER}
    return KeyRing(
        [parse_key(key_record(secret, name=name, admin=name == "admin"), name) for name, secret in secrets.items()]
    )


@pytest.fixture(scope="module")
def guarded(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    """A server with keys, and without bursts."""
    with run_server(tiny_llm(max_num_seqs=4), "tiny", keys=make_keys()) as running:
        yield running


@pytest.fixture(scope="module")
def open_server(tiny_llm: Callable[..., AsyncLLM]) -> Iterator[RunningServer]:
    """A server without keys, and with bursts."""
    with run_server(tiny_llm(max_num_seqs=4), "tiny", page_control=True) as running:
        yield running


def get(server: RunningServer, path: str, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{server.url}{path}", headers=headers)


def stream(server: RunningServer, path: str, key: str) -> AbstractContextManager[httpx.Response]:
    return httpx.stream("GET", f"{server.url}{path}", headers={"Authorization": f"Bearer {key}"})


def read_stream(server: RunningServer, key: str, until: Callable[[list[Any]], bool]) -> list[Any]:
    """The messages of the live page's stream as (type, data), until the condition holds."""
    messages: list[Any] = []
    with stream(server, "/v1/page/events", key) as response:
        assert response.status_code == 200
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                messages.append((kind, json.loads(line[6:])))
                if until(messages):
                    break
    return messages


def event_ids(messages: list[Any], kind: str) -> list[str]:
    return [e["request_id"] for _, data in messages for e in data.get("events", []) if e["type"] == kind]


@pytest.mark.parametrize("path", ["/", "/chat", "/docs"])
def test_pages_need_no_key_and_allow_no_foreign_or_inline_script(guarded: RunningServer, path: str) -> None:
    answer = get(guarded, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy


def test_the_api_page_needs_no_key_and_nothing_of_another_host(guarded: RunningServer) -> None:
    page = get(guarded, "/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    files = re.findall(r'(?:src|href|url)[=:]\s*["\']([^"\']+)', page.text)
    assert len(files) == 4
    for path in (*files, "openapi.json"):
        assert get(guarded, f"/{path}").status_code == 200, path


def test_a_proxy_may_publish_the_server_below_a_path(tiny_llm: Callable[..., AsyncLLM], tmp_path: Path) -> None:
    """The proxy removes the path from requests. Keys, error forms and the access log see the paths of the routes."""
    log = tmp_path / "calls.jsonl"
    with run_server(tiny_llm(max_num_seqs=4), "tiny", keys=make_keys(), access_log=log, root_path="/below") as server:
        assert get(server, "/openapi.json").json()["servers"] == [{"url": "/below"}]
        assert get(server, "/chat/", OWN).headers["location"] == f"{server.url}/below/chat"
        for path in ("/", "/health", "/page/live.js", "/docs", "/docs/swagger-ui.css"):
            assert get(server, path).status_code == 200, path
        assert get(server, "/v1/models").status_code == 401
        assert "did you mean /v1/models?" in get(server, "/v1/model", OWN).json()["error"]["message"]
        assert server.post("/v1/messages", {}, OWN).json()["type"] == "error"
        assert server.post("/v1/completions", completion_body(2), OWN).status_code == 200
    assert '"/v1/completions"' in (lines := log.read_text())
    assert "/below" not in lines


@pytest.mark.parametrize("text", ["below", "https://a/b", "/a b", "/a//b", "/a?b"])
def test_another_root_path_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"root_path=.* is not a path: write it as /chairlift"):
        parse_root_path(text)


def test_a_root_path_may_end_with_a_slash() -> None:
    assert [parse_root_path(text) for text in ("/a/b/", "/", "")] == ["/a/b", "", ""]


def test_no_file_outside_of_the_pages_is_served(guarded: RunningServer) -> None:
    for path in (
        "/page/../page_routes.py",
        "/page/%2e%2e/page_routes.py",
        "/page/..%2fpage_routes.py",
        "/page/index.html",
    ):
        assert get(guarded, path).status_code in (401, 404)


def test_the_data_of_the_page_needs_a_key(guarded: RunningServer) -> None:
    for path in ("/v1/page", "/v1/page/events"):
        assert get(guarded, path).status_code == 401
    own, admin = get(guarded, "/v1/page", OWN).json(), get(guarded, "/v1/page", ADMIN).json()
    assert (own["key"], own["is_admin"], admin["is_admin"]) == ("own", False, True)
    assert own["models"] == ["tiny"]
    assert not own["control"]


def test_a_key_sees_its_own_requests_and_an_admin_all(guarded: RunningServer) -> None:
    def finished_twice(messages: list[Any]) -> bool:
        if not started:
            started.append(True)
            for key, name in ((OWN, "mine"), (OTHER, "theirs")):
                body = completion_body(3, request_id=name)
                assert guarded.post("/v1/completions", body, key).status_code == 200
        return len(event_ids(messages, "request_finished")) >= 2

    started: list[bool] = []
    own = json.dumps(read_stream(guarded, OWN, finished_twice))
    assert "mine" in own
    assert "theirs" not in own
    assert '"tenant": "other"' not in own
    started.clear()
    assert "theirs" in json.dumps(read_stream(guarded, ADMIN, finished_twice))


def test_an_admin_gets_the_history_first_and_another_key_a_snapshot(guarded: RunningServer) -> None:
    assert guarded.post("/v1/completions", completion_body(3, request_id="before"), OWN).status_code == 200
    messages = read_stream(guarded, ADMIN, lambda messages: messages[-1][0] == "frame")
    assert [kind for kind, _ in messages[:-1]] == ["history"] * (len(messages) - 1)
    assert any("before" in request_id for request_id in event_ids(messages, "request_finished"))
    assert messages[-1][1]["time"] > 0
    ((kind, first_frame),) = read_stream(guarded, OWN, lambda messages: messages[-1][0] == "frame")
    assert kind == "frame"
    assert [event["type"] for event in first_frame["events"]] == ["engine_started", "snapshot"]


@pytest.mark.parametrize("path", ["/v1/page/events", "/v1/events"])
def test_the_readers_of_a_key_are_limited_and_a_closed_stream_is_not_counted(guarded: RunningServer, path: str) -> None:
    def can_open(key: str = ADMIN) -> bool:
        with stream(guarded, path, key) as response:
            return response.status_code == 200

    with ExitStack() as opened:
        for _ in range(MAX_EVENT_STREAMS):
            assert opened.enter_context(stream(guarded, path, ADMIN)).status_code == 200
        refused = get(guarded, path, ADMIN)
        assert refused.status_code == 429
        assert "this key reads 16 event streams, the maximum: close one" in refused.json()["error"]["message"]
        (other,) = {"/v1/page/events", "/v1/events"} - {path}
        assert opened.enter_context(stream(guarded, other, ADMIN)).status_code == 200, "each path has its own limit"
        assert can_open(OWN) == (path == "/v1/page/events"), "streams of one key do not count for another"
    wait_for(can_open)


@pytest.mark.parametrize("path", ["/v1/page/events", "/v1/events"])
def test_the_stream_of_a_revoked_or_changed_key_ends(tiny_llm: Callable[..., AsyncLLM], path: str) -> None:
    keys = make_keys()
    with run_server(tiny_llm(max_num_seqs=4), "tiny", keys=keys) as server, stream(server, path, ADMIN) as response:
        lines = response.iter_lines()
        assert server.post("/v1/completions", completion_body(3), OWN).status_code == 200
        assert next(lines)
        keys.by_tenant = make_keys(admin="sk-another-admin-admin").by_tenant
        assert server.post("/v1/completions", completion_body(3, request_id="later"), OWN).status_code == 200
        assert "later" not in "".join(lines)
        assert get(server, path, ADMIN).status_code == 401


def test_the_stream_of_a_revoked_key_ends_without_an_event(tiny_llm: Callable[..., AsyncLLM]) -> None:
    keys = make_keys()
    with (
        run_server(tiny_llm(max_num_seqs=4), "tiny", keys=keys) as server,
        stream(server, "/v1/events", ADMIN) as response,
    ):
        lines = response.iter_lines()
        assert next(lines)
        keys.by_tenant = make_keys(admin="sk-another-admin-admin").by_tenant
        pings = (line for line in lines if line == ": keep-alive")
        assert len(list(islice(pings, 3))) < 3, "the stream ends long before the third ping"


def test_an_open_page_does_not_delay_the_end_of_the_server(tiny_llm: Callable[..., AsyncLLM]) -> None:
    with run_server(tiny_llm(max_num_seqs=4), "tiny") as server:
        server.slow_down(0.02)
        with httpx.stream("GET", f"{server.url}/v1/page/events") as response:
            lines = response.iter_lines()
            assert next(lines)
            body = completion_body(50, request_id="last", stream=True, return_token_ids=True)
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                chunks = answer.iter_lines()
                assert next(chunks)
                server.uvicorn.handle_exit(signal.SIGTERM, None)
                assert list(chunks)[-2:] == ["data: [DONE]", ""]
            assert any('"request_finished"' in line for line in lines), "the page shows the last request to its end"


def test_bursts_need_page_control(guarded: RunningServer) -> None:
    answer = guarded.post("/v1/page/burst", {}, ADMIN)
    assert answer.status_code == 403
    assert "--page-control" in answer.json()["error"]["message"]


def test_the_requests_of_a_burst_have_no_readers(open_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed, start = [], open_server.llm.start

    def record(text: Any, token_ids: Any, params: SamplingParams, **options: Any) -> Any:
        streamed.append(params.is_streamed)
        return start(text, token_ids, params, **options)

    monkeypatch.setattr(open_server.llm, "start", record)
    open_server.post("/v1/page/burst", {"num_requests": 2, "max_prompt_tokens": 16, "max_output_tokens": 16})
    assert streamed == [False, False]


def test_a_burst_is_served(open_server: RunningServer) -> None:
    bounds = {"min_prompt_tokens": 3, "max_prompt_tokens": 30, "min_output_tokens": 2, "max_output_tokens": 20}
    answer = open_server.post("/v1/page/burst", {"num_requests": 12, "seed": 3, **bounds})
    assert answer.status_code == 200
    burst = answer.json()["requests"]
    assert len(burst) == 12
    assert all(3 <= r["num_prompt_tokens"] <= 30 and 2 <= r["num_output_tokens"] <= 20 for r in burst)
    assert {r["max_tokens"] for r in burst} == {80}, "generous: four times the longest output"
    assert not open_server.llm.num_unfinished, "the response ends with its requests"
    for request in burst:
        (sequence,) = get(open_server, f"/v1/requests/{request['id']}").json()["sequences"]
        assert sequence["state"] == "finished"
        assert sequence["num_prompt_tokens"] == request["num_prompt_tokens"]
        assert sequence["num_output_tokens"] == request["num_output_tokens"]
    assert open_server.admission.num_calls == 0


def test_the_same_seed_gives_the_same_burst(open_server: RunningServer) -> None:
    def lengths(seed: int) -> list[tuple[int, int]]:
        body = {"num_requests": 3, "max_prompt_tokens": 40, "max_output_tokens": 20, "seed": seed}
        requests = open_server.post("/v1/page/burst", body).json()["requests"]
        return [(r["num_prompt_tokens"], r["num_output_tokens"]) for r in requests]

    assert lengths(1) == lengths(1) != lengths(2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"num_requests": 0}, "num_requests must be greater than or equal to 1, got 0"),
        ({"requests": 3}, "requests is unknown"),
        ({"min_output_tokens": 9, "max_output_tokens": 4}, "min_output_tokens=9 must be at most"),
        ({"max_output_tokens": 9, "max_tokens": 4}, "max_output_tokens=9 must be at most max_tokens=4"),
        ({"max_prompt_tokens": 4000}, "max_model_len="),
        ([], "body must be an object"),
    ],
)
def test_wrong_bodies_are_rejected(open_server: RunningServer, body: object, message: str) -> None:
    answer = open_server.post("/v1/page/burst", body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_only_json_is_accepted_because_other_sites_can_send_other_types(open_server: RunningServer) -> None:
    answer = httpx.post(f"{open_server.url}/v1/page/burst", content="{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    nested = httpx.post(
        f"{open_server.url}/v1/page/burst", content="[" * 9999, headers={"Content-Type": "application/json"}
    )
    assert nested.status_code == 400


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "max_model_len"), [(40, 6, 4096), (3000, 64, 8192), (9, 4, 64), (4000, 4, 1024)]
)
def test_a_burst_of_the_default_sizes_fits_the_engine_and_fills_it(
    num_blocks: int, max_num_seqs: int, max_model_len: int
) -> None:
    started = engine_started(max_num_seqs=max_num_seqs, num_blocks=num_blocks, max_model_len=max_model_len)
    sizes = BurstSizes.of(BurstBody(), started)
    assert sizes.num_requests == 2 * max_num_seqs
    assert sizes.prompt[1] + sizes.max_tokens <= max_model_len
    assert sizes.max_tokens > sizes.output[1], "generous"
    num_slots = num_blocks * started.block_size
    fills = max_num_seqs * (sum(sizes.prompt) + sum(sizes.output)) / 2 > num_slots
    assert fills or num_slots // max_num_seqs > max_model_len // 2, "the longest requests are too short to fill it"


def test_given_sizes_of_a_burst_move_the_other_bound() -> None:
    started = engine_started(max_num_seqs=6, num_blocks=40, max_model_len=4096)
    assert BurstSizes.of(BurstBody(max_prompt_tokens=20), started).prompt == (20, 20)
    assert BurstSizes.of(BurstBody(min_prompt_tokens=500), started).prompt == (500, 500)
    assert BurstSizes.of(BurstBody(max_output_tokens=5, max_tokens=7), started).max_tokens == 7
    assert BurstSizes.of(BurstBody(max_tokens=7), started).output == (7, 7)


def engine_started(**limits: int) -> EngineStarted:
    return EngineStarted(
        time=0.0, model="m", scheduling_policy="fcfs", kv="paged", enable_prefix_caching=False, block_size=16,
        max_num_batched_tokens=512, **limits,
    )  # fmt: skip


def test_the_prompts_of_a_burst_are_drawn_after_its_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def admit(self, prompts: list[range]) -> None:
            assert len(prompts) == 2 * 6
            raise OverloadedError("the queue is full", 1.0, "queue_full")

    started = engine_started(max_num_seqs=6, num_blocks=40, max_model_len=4096)
    facts = SimpleNamespace(scheduler_config=SimpleNamespace(max_model_len=4096), started=started)
    llm = cast(AsyncLLM, SimpleNamespace(engine=SimpleNamespace(facts=facts)))
    monkeypatch.setattr("chairlift.server.web.burst._random_prompts", lambda *_: pytest.fail("prompts were drawn"))
    with pytest.raises(OverloadedError):
        asyncio.run(start_burst(llm, cast(Permit, Full()), BurstBody()))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return recorded_log(tmp_path)


def test_the_page_shows_the_log(log: Path) -> None:
    client = TestClient(recorded_log_app(log), base_url="http://127.0.0.1")
    assert client.get("/").status_code == 200
    view = client.get("/v1/page").json()
    assert view["recorded_log"] == "run.jsonl"
    assert not view["control"]
    assert client.get("/v1/page/log").text == log.read_text()


@pytest.mark.parametrize(("lang", "head"), [(None, "<html lang="), ("zh-TW", '<html data-lang="zh-TW" lang=')])
def test_the_page_names_the_language_of_the_command(log: Path, lang: Language | None, head: str) -> None:
    page = TestClient(recorded_log_app(log, lang=lang), base_url="http://127.0.0.1").get("/")
    assert head in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]


def test_other_hosts_are_rejected(log: Path) -> None:
    client = TestClient(recorded_log_app(log), base_url="http://attacker.example")
    assert client.get("/v1/page/log").status_code == 400


def test_another_host_answers_to_its_names(log: Path) -> None:
    for app in (recorded_log_app(log, "0.0.0.0"), page_app("two runs", "0.0.0.0")):
        assert TestClient(app, base_url="http://lab.example").get("/").status_code == 200
    assert TestClient(page_app("two runs"), base_url="http://127.0.0.1").get("/").text == "two runs"
    assert TestClient(page_app("two runs"), base_url="http://attacker.example").get("/").status_code == 400


@pytest.mark.parametrize(
    ("host", "name"), [("localhost", "localhost"), ("127.0.0.1", "localhost"), ("::1", "[::1]"), ("127.0.0.2",) * 2]
)
def test_every_host_of_the_loopback_interface_has_its_own_names_only(log: Path, host: str, name: str) -> None:
    for app in (recorded_log_app(log, host), page_app("two runs", host)):
        client = TestClient(app)
        assert client.get("/", headers={"host": f"{name}:8123"}).status_code == 200
        assert client.get("/", headers={"host": "attacker.example"}).status_code == 400


def test_a_file_that_is_no_event_log_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"notes.txt, line 1"):
        recorded_log_app(path)
    with pytest.raises(ConfigError, match="No such file"):
        recorded_log_app(tmp_path / "missing.jsonl")
    path.write_text("")
    with pytest.raises(ConfigError, match=r"notes.txt: its first event must be engine_started"):
        recorded_log_app(path)
