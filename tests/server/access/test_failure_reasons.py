"""Why an engine failed names files of the server: callers without an admin key get the id of the failure in the log."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift import AsyncLLM
from chairlift.errors import EngineDeadError, EngineUnavailableError, Failure
from chairlift.server.access.keys import KeyRing, key_record, parse_key
from chairlift.server.api.routes import ENDPOINTS
from support.plain_http import NO_TLS
from support.running_server import RunningServer, run_server
from support.waiting import AMPLE_SECONDS, wait_for

ADMIN, PLAIN = "sk-admin-admin-admin", "sk-plain-plain-plain"
SECRET = "/srv/weights/secret-17.safetensors"
FAILURE_ID = re.compile(r"failure ([0-9a-f]{8})")
HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG = {"max_tokens": 600, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", **LONG},
    "/v1/chat/completions": {"messages": HELLO, **LONG},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 600, "ignore_eos": True},
    "/v1/messages": {"messages": HELLO, **LONG},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/embeddings": {"input": "Hello"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [3]},
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
BODIES |= {f"{path}/render": BODIES[path] for path in STREAMED}
READ = (
    "/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/v1/requests", "/v1/page", "/tokenizer_info",
    "/server_info", "/model_info",
)  # fmt: skip


@pytest.fixture
def server(api_folder: Path) -> Iterator[RunningServer]:
    llm = AsyncLLM(model=str(api_folder), num_kv_blocks=600, num_threads=1)
    records = [key_record(secret, name=secret, admin=secret == ADMIN) for secret in (ADMIN, PLAIN)]
    with run_server(llm, "tiny", keys=KeyRing(parse_key(record, "test") for record in records)) as running:
        yield running


def stream(server: RunningServer, path: str, key: str) -> str:
    return server.post(path, {"model": "tiny", "stream": True, **BODIES[path]}, key).text


def read(server: RunningServer, path: str, key: str) -> str:
    return httpx.get(
        server.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=AMPLE_SECONDS, verify=NO_TLS
    ).text


def test_every_endpoint_has_a_body() -> None:
    assert BODIES.keys() == {endpoint.path for endpoint in ENDPOINTS}


def test_a_plain_key_reads_no_path_when_the_engine_dies(
    server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started, broken = {}, threading.Event()
    executor: Any = server.llm.engine.core._executor  # type: ignore[attr-defined]
    submit = executor.submit

    def breaks(output: Any) -> Any:
        if broken.is_set():
            raise RuntimeError(f"cannot read {SECRET}")
        return submit(output)

    executor.submit = breaks
    gate = server.hold_steps()
    texts: dict[tuple[str, str, str], str] = {}

    def run(path: str, key: str) -> None:
        texts["stream", path, key] = stream(server, path, key)

    for path in STREAMED:
        for key in (ADMIN, PLAIN):
            thread = started[path, key] = threading.Thread(target=run, args=(path, key))
            thread.start()
    wait_for(lambda: server.llm.num_unfinished == len(started))
    with caplog.at_level(logging.ERROR):
        broken.set()
        gate.open()
        for thread in started.values():
            thread.join()
    for key in (ADMIN, PLAIN):
        texts.update({("call", path, key): server.post(path, BODIES[path], key).text for path in BODIES})
        texts.update({("read", path, key): read(server, path, key) for path in READ})
    assert all(SECRET in texts["stream", path, ADMIN] for path in STREAMED)
    assert all(SECRET in texts["call", path, ADMIN] for path in STREAMED)
    for (kind, path, key), text in texts.items():
        if key == PLAIN:
            assert SECRET not in text, (kind, path)
            assert str(tmp_path) not in text, (kind, path)
    ids = {number for kind, _, key in texts if key == PLAIN for number in FAILURE_ID.findall(texts[kind, _, key])}
    assert len(ids) == 1
    assert ids.pop() in caplog.text


def test_a_plain_key_reads_no_path_while_the_engine_cannot_be_restarted(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = Failure(f"{SECRET} is damaged")
    error = EngineUnavailableError(*(f"the engine cannot be restarted: {text}" for text in failure.texts), 7.0)
    monkeypatch.setattr(type(server.llm._client), "unavailable", property(lambda _: error))
    monkeypatch.setattr(server.llm._client, "state", "cannot_restart")
    monkeypatch.setattr(server.llm._client, "last_failure", failure)
    for path in STREAMED:
        for body in (BODIES[path], {**BODIES[path], "stream": True}):
            answers = {key: server.post(path, body, key) for key in (ADMIN, PLAIN)}
            assert [answer.status_code for answer in answers.values()] == [503, 503]
            assert SECRET in answers[ADMIN].text
            assert SECRET not in answers[PLAIN].text
            assert failure.failure_id in answers[PLAIN].text
    for path in ("/health", "/ready"):
        assert SECRET in read(server, path, ADMIN)
        assert SECRET not in read(server, path, PLAIN)


def test_an_error_without_a_reason_is_the_same_for_all_keys() -> None:
    assert EngineDeadError("the server stops").text(is_admin=False) == "the server stops"
