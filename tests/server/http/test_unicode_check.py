"""Strings with unpaired surrogates in request bodies cause a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams
from chairlift.server.http.unicode_check import may_contain_surrogate
from plain_http import NO_TLS
from running_server import RunningServer

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
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"stop": HALF}, "stop"),
    ("/v1/completions", {"stop": ["x", HALF]}, "stop[1]"),
    ("/v1/completions", {"bad_words": [HALF]}, "bad_words[0]"),
    ("/v1/completions", {"user": HALF}, "user"),
    ("/v1/completions", {"model": HALF}, "model"),
    ("/v1/completions", {"cache_salt": HALF}, "cache_salt"),
    ("/v1/completions", {"request_id": HALF}, "request_id"),
    ("/v1/completions", {"metadata": {HALF: "x"}}, "metadata"),
    ("/v1/completions", {"structured_outputs": {"regex": HALF}}, "structured_outputs.regex"),
    ("/v1/completions", {HALF: 1}, "body"),
    ("/v1/chat/completions", {"stop": [HALF]}, "stop[0]"),
    ("/v1/chat/completions", {"bad_words": [HALF]}, "bad_words[0]"),
    ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "name": HALF}]}, "messages[0].name"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": FUNCTION}]}, "tools[0].function.description"),
    ("/v1/chat/completions", {"documents": [{"text": HALF}]}, "documents[0].text"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"x": [HALF]}}, "chat_template_kwargs.x[0]"),
    ("/v1/chat/completions", {"chat_template": HALF}, "chat_template"),
    ("/v1/responses", {"stop": [HALF]}, "stop[0]"),
    ("/v1/responses", {"bad_words": [HALF]}, "bad_words[0]"),
    ("/v1/responses", {"user": HALF}, "user"),
    ("/v1/responses", {"instructions": HALF}, "instructions"),
    ("/v1/responses", {"metadata": {"a": HALF}}, "metadata.a"),
    ("/v1/responses", {"tools": [{"type": "function", **FUNCTION}]}, "tools[0].description"),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": HALF, "schema": {}}}},
        "text.format.name",
    ),
    ("/v1/messages", {"stop_sequences": [HALF]}, "stop_sequences[0]"),
    ("/v1/messages", {"bad_words": [HALF]}, "bad_words[0]"),
    ("/v1/messages", {"metadata": {"user_id": HALF}}, "metadata.user_id"),
    ("/v1/messages/count_tokens", {"system": HALF}, "system"),
    ("/tokenize", {"prompt": HALF}, "prompt"),
    ("/detokenize", {"model": HALF}, "model"),
]


def post(server: RunningServer, path: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=30, verify=NO_TLS)


@pytest.mark.parametrize(("path", "fields", "named"), CASES)
def test_an_unpaired_surrogate_causes_a_400_that_names_the_field(
    api_server: RunningServer, path: str, fields: dict[str, Any], named: str
) -> None:
    streamed = {} if "token" in path else {"stream": True}
    for more in ({}, streamed):
        response = post(api_server, path, json.dumps({**BODIES[path], **fields, **more}).encode())
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith(f"{named} must ")
        assert "valid Unicode text" in error["message"]
        if not path.startswith("/v1/messages"):
            assert error["param"] == named.partition("[")[0].partition(".")[0]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": [3], "max_tokens": 1, "user": "\xed\xa0\x80"}',
        json.dumps({"prompt": [3], "max_tokens": 1, "user": HALF}).encode("utf-16"),
        b'{"prompt": [3], "max_tokens": 1, "user": "' + b"\\ud83d\\ude00" * 30_000 + b'\\uDE00"}',
    ],
    ids=["encoded as UTF-8", "in UTF-16", "in a large body"],
)
def test_unpaired_surrogates_in_other_encodings_are_rejected_too(api_server: RunningServer, content: bytes) -> None:
    response = post(api_server, "/v1/completions", content)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "user")


def test_an_unpaired_surrogate_in_nested_json_text_causes_no_server_error(api_server: RunningServer) -> None:
    chat = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}], "max_tokens": 2}
    text = {**BODIES["/v1/completions"], "structured_outputs": {"json": '{"const": "\\ud800"}'}}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        assert post(api_server, path, json.dumps(body).encode()).status_code in (200, 400)


def test_surrogate_pairs_and_escaped_backslashes_are_valid(api_server: RunningServer) -> None:
    for text in ("\U0001f600", "\\ud800", "\\\\ud800\U0001f600", "\ud7ff\ue000"):
        body = {**BODIES["/v1/completions"], "user": text}
        assert post(api_server, "/v1/completions", json.dumps(body).encode()).status_code == 200
        assert post(api_server, "/v1/completions", json.dumps(body, ensure_ascii=False).encode()).status_code == 200


def _is_unicode(text: str) -> bool:
    return not any(0xD800 <= ord(character) <= 0xDFFF for character in text)


@given(st.text(st.sampled_from('\ud800\udbff\udc00\udfffud8\\"a\ue000\U0001f600'), max_size=8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_fast_check_finds_every_unpaired_surrogate(text: str, ascii_only: bool) -> None:
    body = json.dumps(text, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if not _is_unicode(json.loads(body)):
        assert may_contain_surrogate(body)


@pytest.mark.parametrize("fields", [{"stop": HALF}, {"stop": ["x", HALF]}, {"bad_words": [HALF]}])
def test_sampling_parameters_reject_unpaired_surrogates(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="must be valid Unicode text") as caught:
        SamplingParams(**fields)
    assert caught.value.param in fields
