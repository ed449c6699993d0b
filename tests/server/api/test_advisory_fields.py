"""Tests advisory fields: they are accepted, and the response and the access log name those without an effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_planner import planner
from openai.types.responses import Response

from chairlift import AsyncLLM
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.responses import ResponseObject
from support.running_server import RunningServer, run_server
from support.waiting import wait_for

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
INPUT: dict[str, Any] = {"input": "hi", "max_output_tokens": 3, "temperature": 0}
PROMPT: dict[str, Any] = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
MARKED = {"type": "text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
SCHEMA: dict[str, Any] = {"properties": {"é\r\n" * 30: {"not": {"type": "null"}, "uniqueItems": True}}}
FORCED = {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("path", "body", "fields", "ignored"),
    [
        ("/v1/chat/completions", CHAT, {"store": True}, "store"),
        ("/v1/chat/completions", CHAT, {"metadata": {"run": "7"}, "user": "me"}, "metadata, user"),
        ("/v1/chat/completions", CHAT, {"verbosity": "low", "prompt_cache_key": "k"}, "verbosity"),
        ("/v1/chat/completions", CHAT, {"prompt_cache_retention": "24h"}, None),
        ("/v1/chat/completions", CHAT, {"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": [MARKED]}]}, None),
        ("/v1/chat/completions", CHAT, {"safety_identifier": "a", "stream": True}, "safety_identifier"),
        ("/v1/chat/completions", CHAT, {"store": False, "metadata": {}, "verbosity": "medium", "user": None}, None),
        ("/v1/chat/completions", CHAT, {"service_tier": "auto"}, None),
        ("/v1/completions", PROMPT, {"store": True, "metadata": {"a": "b"}}, "metadata, store"),
        ("/v1/responses", INPUT, {"store": True, "truncation": "auto"}, "truncation"),
        ("/v1/responses", INPUT, {"metadata": {"a": "b"}, "truncation": "disabled"}, None),
        (
            "/v1/responses",
            INPUT,
            {"reasoning": {"summary": "auto"}, "text": {"verbosity": "low"}},
            "reasoning.summary, text.verbosity",
        ),
        ("/v1/messages", CHAT, {"metadata": {"user_id": "me"}}, "metadata"),
        ("/v1/chat/completions", CHAT, FORCED, f"tools.f.properties.{'%C3%A9%0D%0A' * 30}"[:160]),
    ],
)
def test_the_response_names_fields_without_an_effect(
    api_server: RunningServer, path: str, body: dict[str, Any], fields: dict[str, Any], ignored: str | None
) -> None:
    answer = api_server.post(path, {**body, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-chairlift-ignored") == ignored

    def lines() -> list[dict[str, Any]]:
        """The lines of this call, which are written after its response."""
        return [line for line in api_server.logged_calls() if line.get("request_id", "no id") in answer.text]

    wait_for(lambda: bool(lines()))
    (line,) = lines()
    assert line["path"] == path
    assert line.get("ignored") == (None if ignored is None else ignored.replace(" ", ""))


def test_a_reasoning_effort_that_the_template_does_not_read_is_ignored(smollm2_gguf: Path) -> None:
    llm = AsyncLLM(model=str(smollm2_gguf), num_kv_blocks=60, num_threads=1, max_num_seqs=2)
    with run_server(llm, "smollm2") as server:
        plain = server.post("/v1/chat/completions", CHAT)
        given = server.post("/v1/chat/completions", {**CHAT, "reasoning_effort": "high"})
        response = server.post("/v1/responses", {**INPUT, "reasoning": {"effort": "low"}})
    assert "x-chairlift-ignored" not in plain.headers
    assert given.headers["x-chairlift-ignored"] == "reasoning_effort"
    assert given.json()["choices"] == plain.json()["choices"]
    assert response.headers["x-chairlift-ignored"] == "reasoning"


def test_a_reasoning_effort_that_the_template_reads_has_an_effect(api_server: RunningServer) -> None:
    answer = api_server.post("/v1/chat/completions", {**CHAT, "reasoning_effort": "low"})
    assert "x-chairlift-ignored" not in answer.headers
    plain = api_server.post("/v1/chat/completions", CHAT)
    assert answer.json()["usage"]["prompt_tokens"] > plain.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "expected", "ignored"),
    [
        ({"reasoning_effort": "none"}, "False", ()),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "True", ()),
        ({"reasoning_effort": "low"}, "", ("reasoning_effort",)),
        ({}, "", ()),
    ],
)
def test_the_reasoning_effort_none_switches_thinking_off(
    fields: dict[str, Any], expected: str, ignored: tuple[str, ...]
) -> None:
    planned = planner("{{ messages[0].content }}{{ enable_thinking }}").plan(
        ChatCompletionRequest.model_validate({**CHAT, **fields})
    )
    assert planned.prompts[0][0] == f"hi{expected}"
    assert planned.ignored == ignored


def test_a_response_has_every_field_of_the_official_type(api_server: RunningServer) -> None:
    assert Response.model_fields.keys() <= ResponseObject.model_fields.keys()
    given = {"prompt_cache_key": "k", "safety_identifier": "s", "max_tool_calls": 2}
    answer = api_server.post("/v1/responses", {**INPUT, **given}).json()
    assert answer.items() >= given.items()
    assert answer["prompt_cache_diagnostics"] is None
    Response.model_validate(answer)


def test_a_json_object_may_have_a_schema(api_server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_object", "schema": schema}
    answer = api_server.post("/v1/chat/completions", {**CHAT, "max_tokens": 60, "response_format": form})
    assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"a": 7}


def test_an_aborted_stream_is_logged_with_status_499(tiny_llm: Callable[..., AsyncLLM], tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    body = {"prompt": [5, 6], "max_tokens": 200, "ignore_eos": True, "stream": True, "return_token_ids": True}
    with run_server(tiny_llm(max_num_seqs=1), "tiny", access_log=log) as server:
        server.slow_down(0.02)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
        wait_for(lambda: bool(log.read_text()))
    line = json.loads(log.read_text())
    assert (line["status"], line["is_disconnected"]) == (499, True)
