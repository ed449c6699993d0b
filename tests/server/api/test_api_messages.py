"""/v1/messages with the official client of Anthropic: response types, streams and errors."""

from __future__ import annotations

import json
from typing import Any, get_args

import anthropic
import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from api_matrix import CALL_REGEX, OK_SCHEMA, TOOLS, Row
from api_model import check_type, raw

from chairlift.server.api.messages import MessagesCall
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.tools.answer_parser import DeltaMessage, DeltaToolCall
from support.plain_http import NO_TLS
from support.running_server import RunningServer

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
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "enabled", "budget_tokens": 2}, "tools": CLAUDE_TOOLS},
    {"thinking": {"type": "disabled"}, "extra_body": {"top_k": 5, "top_p": 0.9, "temperature": 1.0}},
    {"output_config": {"format": {"type": "json_schema", "schema": OK_SCHEMA}}, "max_tokens": 40},
    {"extra_body": {"timings": True}},
]


def client(server: RunningServer) -> anthropic.Anthropic:
    http = anthropic.DefaultHttpxClient(verify=NO_TLS)
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=120, http_client=http)


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
    texts = [block for block in whole["content"] if block["type"] == "text"]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert not any("citations" in block for block in [*texts, *starts])


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


def test_models_have_the_fields_of_anthropic(api_server: RunningServer) -> None:
    (model,) = client(api_server).models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert client(api_server).models.retrieve("tiny").created_at == model.created_at
    assert model.created_at.tzinfo is not None


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
    with pytest.raises(anthropic.BadRequestError, match="thread is not supported") as caught:
        client(api_server).messages.create(**request, extra_body={"thread": {"type": "create"}})
    assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}  # type: ignore[index]
    for unknown in ("frobnicate", "safeguards"):  # Claude Code may send the second one; nothing here applies them.
        with pytest.raises(anthropic.BadRequestError, match=f"{unknown} is unknown or not supported"):
            client(api_server).messages.create(**request, extra_body={unknown: {"type": "auto"}})
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences must not contain an empty string"):
        client(api_server).messages.create(**request, stop_sequences=[""])


WEATHER: Row = {"name": "add", "input_schema": {"type": "object"}}
SEARCH: Row = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CLEAR: Row = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]}


def after(*blocks: Row) -> Row:
    answer = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "y", "citations": [{}]}]}
    return {"messages": [{"role": "user", "content": "x"}, answer, {"role": "user", "content": "z"}]}


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"context_management": CLEAR}, "context_management"),
        ({"context_management": {"edits": []}, "mcp_servers": [], "container": None}, None),
        ({"container": "c"}, "container"),
        ({"container": {"id": None, "skills": []}, "speed": "fast"}, "container, speed"),
        ({"diagnostics": {"previous_message_id": None}, "fallbacks": "default"}, "diagnostics, fallbacks"),
        ({"user_profile_id": "u", "billing_policy": {"bill_to": "self"}}, "billing_policy, user_profile_id"),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, "thinking.display"),
        ({"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral", "scope": "global"}}]}, None),
        ({"tools": [SEARCH]}, "tools.web_search_20250305"),
        ({"tools": [WEATHER, {"type": "code_execution_20250825", "name": "c"}]}, "tools.code_execution_20250825"),
        (
            {"tools": [{"type": "mcp_toolset", "mcp_server_name": "m"}, {"type": "bash_20250124", "name": "bash"}]},
            "tools.bash_20250124, tools.mcp_toolset",
        ),
        (
            {
                "tools": [
                    {**WEATHER, "defer_loading": True, "input_examples": [{"n": 1}], "allowed_callers": ["direct"]}
                ]
            },
            "tools.defer_loading, tools.input_examples",
        ),
        (
            {
                "tools": [
                    {
                        **WEATHER,
                        "type": "custom",
                        "defer_loading": False,
                        "allowed_callers": ["code_execution_20250825"],
                    }
                ]
            },
            "tools.allowed_callers",
        ),
        (after({"type": "redacted_thinking", "data": "abc"}), "messages.redacted_thinking"),
        (
            after(
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            ),
            "messages.server_tool_use, messages.web_search_tool_result",
        ),
        (after({"type": "tool_use", "id": "t", "name": "add", "input": '{"n": ', "caller": {"type": "direct"}}), None),
        (after({"type": "tool_result", "tool_use_id": "t", "content": "x", "toolset_name": "browser"}), None),
        (after({"type": "mcp_tool_listing", "mcp_server_name": "m", "tools": []}), "messages.mcp_tool_listing"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"system": "x-anthropic-billing-header: cch=1;"}, "x-anthropic-billing-header"),
    ],
)
def test_fields_of_agents_are_accepted_and_named(api_server: RunningServer, fields: Row, ignored: str | None) -> None:
    body: Row = {"max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}], **fields}
    for path, row in (("/v1/messages", body), ("/v1/messages", {**body, "stream": True})):
        answer = api_server.post(path, row)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-chairlift-ignored") == ignored
    large = json.dumps(body).encode() + b" " * LARGE_BODY
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{api_server.url}/v1/messages", content=large, headers=headers, timeout=120, verify=NO_TLS)
    assert answer.headers.get("x-chairlift-ignored") == ignored
    del body["max_tokens"]
    assert api_server.post("/v1/messages/count_tokens", body).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"context_managment": {"edits": []}},
        {"context_management": {"edits": [{"type": "clear_everything"}]}},
        {"context_management": {"edit": []}},
        {"thinking": {"type": "enabled", "budget": 3}},
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
        {"tools": [{**WEATHER, "defer_load": True}]},
        {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        {"mcp_servers": [{"type": "url", "url": "http://m", "name": "m"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cachecontrol": {}}]}]},
    ],
)
def test_misspelled_and_meaningful_fields_are_errors(api_server: RunningServer, fields: Row) -> None:
    body: Row = {"max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}], **fields}
    assert api_server.post("/v1/messages", body).status_code == 400


def test_a_found_tool_is_named_in_the_result(api_server: RunningServer) -> None:
    def count(content: Any) -> int:
        use = {"type": "tool_use", "id": "t", "name": "find", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        turns = [("user", "x"), ("assistant", [use]), ("user", [result])]
        body = {"messages": [{"role": role, "content": turn} for role, turn in turns]}
        answer = api_server.post("/v1/messages/count_tokens", body).json()
        return int(answer["input_tokens"])

    assert count([{"type": "tool_reference", "tool_name": "add"}]) == count("add")


def test_the_end_of_a_call_is_before_the_text_after_it() -> None:
    """Both may be in one delta, for example if the engine returns several tokens at once."""
    call = object.__new__(MessagesCall)
    call.ended_items, call.open_item = [], None
    call._write_parts(DeltaMessage(tool_calls=[DeltaToolCall(0, "c", "add", '{"n": ')]), [])
    call._write_parts(DeltaMessage("Done.", tool_calls=[DeltaToolCall(0, None, None, "1}")]), [])
    call.end_answer()
    assert [(item.kind, item.text) for item in call.ended_items] == [
        ("function_call", '{"n": 1}'),
        ("message", "Done."),
    ]
