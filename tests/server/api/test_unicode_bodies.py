"""Request bodies that contain no valid Unicode text cause a 400."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams
from support.plain_http import NO_TLS
from support.running_server import RunningServer

HALF = "\ud800"
MESSAGES = [{"role": "user", "content": "one"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [3, 4], "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "one", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [3]},
}
FUNCTION = {"name": "f", "description": HALF}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"stop": ["x", HALF]}),
    ("/v1/completions", {"metadata": {HALF: "x"}}),
    ("/v1/completions", {HALF: 1}),
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "name": HALF}]}),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": FUNCTION}]}),
    ("/v1/chat/completions", {"documents": [{"text": HALF}]}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"x": [HALF]}}),
    ("/v1/responses", {"instructions": HALF}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": HALF, "schema": {}}}}),
    ("/v1/messages", {"stop_sequences": [HALF]}),
    ("/v1/messages/count_tokens", {"system": HALF}),
    ("/tokenize", {"prompt": HALF}),
    ("/detokenize", {"model": HALF}),
]


def post(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, verify=NO_TLS)


@pytest.mark.parametrize(("path", "fields"), CASES)
def test_an_unpaired_surrogate_causes_a_400(api_server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    response = post(api_server, path, json.dumps({**BODIES[path], **fields}).encode())
    assert response.status_code == 400
    assert "the request body is not valid JSON: " in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": [3], "max_tokens": 1, "user": "\xed\xa0\x80"}',
        json.dumps({"prompt": [3], "max_tokens": 1}).encode("utf-16"),
        b'{"prompt": [3], "max_tokens": 1, "user": "' + b"\\ud83d\\ude00" * 30_000 + b'\\uDE00"}',
        b'{"prompt": [3], "max_tokens": ' + b"1" * 5000 + b"}",
    ],
    ids=["encoded as UTF-8", "in UTF-16", "in a large body", "number of 5,000 digits"],
)
def test_other_texts_that_are_not_json_are_rejected_too(api_server: RunningServer, content: bytes) -> None:
    response = post(api_server, "/v1/completions", content)
    assert response.status_code == 400
    assert "the request body is not valid JSON: " in response.json()["error"]["message"]


def test_an_unpaired_surrogate_in_nested_json_text_causes_no_server_error(api_server: RunningServer) -> None:
    chat = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}], "max_tokens": 2}
    text = {**BODIES["/v1/completions"], "structured_outputs": {"json": '{"const": "\\ud800"}'}}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        assert post(api_server, path, json.dumps(body).encode()).status_code in (200, 400)


def test_a_body_may_begin_with_a_byte_order_mark(api_server: RunningServer) -> None:
    assert post(api_server, "/tokenize", b'\xef\xbb\xbf{"prompt": "one"}').status_code == 200


def test_surrogate_pairs_and_escaped_backslashes_are_valid(api_server: RunningServer) -> None:
    for text in ("\U0001f600", "\\ud800", "\\\\ud800\U0001f600", "\ud7ff\ue000"):
        body = {**BODIES["/v1/completions"], "user": text}
        assert post(api_server, "/v1/completions", json.dumps(body).encode()).status_code == 200
        assert post(api_server, "/v1/completions", json.dumps(body, ensure_ascii=False).encode()).status_code == 200


@pytest.mark.parametrize("fields", [{"stop": HALF}, {"stop": ["x", HALF]}, {"bad_words": [HALF]}])
def test_sampling_parameters_reject_unpaired_surrogates(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be valid Unicode text") as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields
