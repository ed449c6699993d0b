"""/v1/messages with the official client of Anthropic: response types, streams and errors."""

from __future__ import annotations

import json
from typing import Any, get_args

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from api_matrix import CALL_REGEX, OK_SCHEMA, TOOLS, Row
from api_model import check_type, raw

from plain_http import NO_TLS
from running_server import RunningServer

EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(RawMessageStreamEvent)[0])
}
CLAUDE_TOOLS: list[Any] = [
    {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}  # type: ignore[index]
    for tool in TOOLS
]
HISTORY: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"n": 1}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}],
    },
]
ROWS: list[Row] = [
    {},
    {"system": "Be brief.", "metadata": {"user_id": "me"}, "service_tier": "auto"},
    {"system": [{"type": "text", "text": "Be brief."}], "stop_sequences": ["e", "a"]},
    {"messages": HISTORY, "tools": CLAUDE_TOOLS},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once"}]},
    {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 90},
    {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 60},
    {"tools": CLAUDE_TOOLS, "extra_body": {"structured_outputs": {"regex": CALL_REGEX}}, "max_tokens": 90},
    {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "none"}},
    {"thinking": {"type": "adaptive"}},
    {"thinking": {"type": "disabled"}, "extra_body": {"top_k": 5, "top_p": 0.9, "temperature": 1.0}},
    {"output_config": {"format": {"type": "json_schema", "schema": OK_SCHEMA}}, "max_tokens": 40},
    {"extra_body": {"timings": True}},
]


def client(server: RunningServer) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(verify=NO_TLS)
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=60, http_client=http)


def without_ids(blocks: list[Row]) -> list[Row]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: json.dumps(row)[:60])
def test_messages(api_server: RunningServer, row: Row) -> None:
    common: Row = {"model": "tiny", "max_tokens": 6, "messages": [{"role": "user", "content": "Hello"}]}
    row = {**common, **row, "extra_body": {"seed": 3, **row.get("extra_body", {})}}
    create = client(api_server).messages.create
    whole = raw(create(**row))
    check_type(Message, whole)
    events = [raw(event) for event in create(**row, stream=True)]
    for event in events:
        check_type(EVENTS[event["type"]], event)
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    with client(api_server).messages.stream(**row) as stream:
        total = raw(stream.get_final_message())
    for name in ("stop_reason", "stop_sequence", "role", "model"):
        assert total[name] == whole[name]
    assert total["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks = [{k: v for k, v in block.items() if k != "parsed_output"} for block in total["content"]]
    assert without_ids(blocks) == without_ids(whole["content"])


def test_a_tool_is_called(api_server: RunningServer) -> None:
    message = client(api_server).messages.create(
        model="tiny",
        max_tokens=60,
        messages=[{"role": "user", "content": "Hello"}],
        tools=CLAUDE_TOOLS,
        tool_choice={"type": "tool", "name": "add"},
        thinking={"type": "disabled"},
    )
    (block,) = message.content
    assert block.type == "tool_use"
    assert set(block.input) == {"ok", "n"}
    assert message.stop_reason == "tool_use"


def test_tokens_are_counted(api_server: RunningServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    count = client(api_server).messages.count_tokens(model="tiny", messages=messages).input_tokens
    answer = client(api_server).messages.create(model="tiny", max_tokens=1, messages=messages)
    assert count == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_errors_have_the_form_of_anthropic(api_server: RunningServer) -> None:
    request: Row = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(anthropic.BadRequestError, match="temperature must be in") as caught:
        client(api_server).messages.create(**request, extra_body={"temperature": -1})
    assert caught.value.body == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "temperature must be in [0, 100], got -1.0"},
    }
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client(api_server).messages.create(**{**request, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="thinking"):
        client(api_server).messages.create(**request, thinking={"type": "enabled", "budget_tokens": 1024})
    with pytest.raises(anthropic.BadRequestError, match="unknown or not supported"):
        client(api_server).messages.create(**request, extra_body={"frobnicate": 1})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences must not contain an empty string"):
        client(api_server).messages.create(**request, stop_sequences=[""])
