"""A new endpoint is one module and one line in the list of endpoints."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from api_model import with_api_tokenizer

from chairlift import AsyncLLM
from chairlift.server.access.keys import Key, KeyRing, digest
from chairlift.server.api.routes import ENDPOINTS, LARGE_BODY
from chairlift.server.application import create_app
from chairlift.server.batch.batch_runner import LineProcessor
from support.byte_tokenizer import VOCAB_SIZE
from support.running_server import RunningServer, open_options, run_server

MODULE = '''
"""The endpoint /v1/token_lengths: the number of bytes of each token of a text."""

from pydantic import BaseModel

from chairlift.server.api.endpoint import endpoint
from chairlift.server.protocol.encoding import encode
from chairlift.server.protocol.base import RequestBody


class LengthsRequest(RequestBody):
    model: str | None = None
    text: str


class LengthsResponse(BaseModel):
    lengths: list[int]


@endpoint("/v1/token_lengths", LengthsResponse)
def token_lengths(planner, body: LengthsRequest):
    """Measure tokens."""
    engine = planner.engine
    tokens = engine.input_processor.encode_text(body.text, "text", add_special_tokens=False)
    return encode(LengthsResponse(lengths=[len(engine.tokenizer.token_bytes(token)) for token in tokens]))
'''
PATH = "/v1/token_lengths"
SECRET = "secret-of-the-endpoint"


@pytest.fixture
def server(
    tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunningServer]:
    """A server whose list of endpoints has the new one."""
    (tmp_path / "token_lengths.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    ENDPOINTS.append(importlib.import_module("token_lengths").token_lengths)
    folder = with_api_tokenizer(tiny_model_dir("llama", vocab_size=VOCAB_SIZE), tmp_path / "model")
    llm = AsyncLLM(model=str(folder), num_kv_blocks=50, num_threads=1)
    keys = KeyRing([Key("ops", digest(SECRET), is_admin=True)])
    try:
        with run_server(llm, "tiny", keys=keys) as running:
            yield running
    finally:
        ENDPOINTS.pop()


def test_an_endpoint_is_one_module_and_one_line(server: RunningServer) -> None:
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}

    def post(content: bytes, **changed: str) -> httpx.Response:
        return httpx.post(server.url + PATH, content=content, headers=headers | changed)

    body = json.dumps({"text": "ab"}).encode()
    assert post(body).json() == {"lengths": [1, 1]}
    assert post(body + b" " * LARGE_BODY).json() == {"lengths": [1, 1]}
    wrong = post(b'{"text": 3}')
    assert wrong.status_code == 400
    assert wrong.json()["error"]["message"] == "text must be a string, got 3"
    assert post(body, Authorization="Bearer other").status_code == 401
    operation = httpx.get(f"{server.url}/openapi.json").json()["paths"][PATH]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/LengthsRequest")
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/LengthsResponse")


def test_batch_files_can_call_a_new_endpoint(server: RunningServer) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": PATH, "body": {"text": "ab"}}).encode()
    answer = asyncio.run(LineProcessor(create_app(server.llm, open_options("tiny"))).answer(1, line))
    assert json.loads(answer.line)["response"]["body"] == {"lengths": [1, 1]}
