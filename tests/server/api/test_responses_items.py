"""/v1/responses accepts the tools and items of coding agents, and what it has produced itself."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from api_matrix import FLAT_TOOLS
from api_model import check_type, raw
from openai.types.responses import Response
from pydantic import ValidationError

from chairlift.errors import RequestError, UnknownItemError
from chairlift.outputs import TokenLogprobs
from chairlift.server.api.item_call import AnswerItem, ItemCall
from chairlift.server.api.routes import LARGE_BODY
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.response_tools import CUSTOM_ARGUMENT
from chairlift.server.protocol.responses import ResponsesRequest
from chairlift.server.protocol.tools import AllowedToolsChoice, selected_tools
from chairlift.server.protocol.validation_errors import validation_problem
from chairlift.server.tools.answer_formats import TOOL_CALL_FORMATS
from chairlift.server.tools.tool_parser import ToolParser
from support.running_server import RunningServer

Row = dict[str, Any]
HI: Row = {"role": "user", "content": "hi"}
GO: Row = {"role": "user", "content": "Continue."}
SHELL: Row = {"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}
CITY: Row = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
MCP: Row = {
    "type": "namespace",
    "name": "mcp__demo",
    "description": "Tools in the mcp__demo namespace.",
    "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": False, "defer_loading": False}],
}
PATCH: Row = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENT: Row = {
    "instructions": "You are a coding agent.",
    "input": [HI],
    "tools": [SHELL],
    "tool_choice": "auto",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 3,
}


def reasoning(**fields: Any) -> Row:
    return {"type": "reasoning", "id": "r1", "summary": [], **fields}


def call(arguments: str, name: str = "echo", **fields: Any) -> Row:
    return {"type": "function_call", "call_id": "c1", "name": name, "arguments": arguments, **fields}


def result(output: Any, kind: str = "function_call_output") -> Row:
    return {"type": kind, "call_id": "c1", "output": output}


THOUGHT = [{"type": "reasoning_text", "text": "hm"}]


def with_tools(*tools: Row) -> Row:
    return {"tools": [SHELL, *tools]}


def with_items(*items: Row) -> Row:
    return {"input": [HI, *items, GO]}


IGNORED: list[tuple[Row, str | None]] = [
    ({"client_metadata": {"thread_id": "t"}}, "client_metadata"),
    ({"client_metadata": None, "service_tier": None, "prompt_cache_key": None}, None),
    ({"service_tier": "priority", "prompt_cache_key": "k"}, "service_tier"),
    ({"service_tier": "default", "reasoning": {"mode": "standard", "context": "auto"}}, None),
    ({"prompt_cache_options": {"mode": "implicit"}}, "prompt_cache_options"),
    ({"include": ["file_search_call.results", "web_search_call.action.sources"]}, None),
    (
        {"reasoning": {"summary": "auto", "context": "all_turns"}, "text": {"verbosity": "low"}},
        "reasoning.context, reasoning.summary, text.verbosity",
    ),
    (with_tools({"type": "web_search", "external_web_access": False}), "tools.web_search"),
    (
        with_tools({"type": "web_search_preview_2025_03_11"}, {"type": "local_shell"}),
        "tools.local_shell, tools.web_search",
    ),
    (with_tools({"type": "mcp", "server_label": "a", "server_url": "https://example.org"}), "tools.mcp"),
    (with_tools({"type": "tool_search", "execution": "client", "parameters": {}}), "tools.tool_search"),
    (with_tools({**PATCH, "format": {"type": "text"}}), None),
    (with_tools(PATCH), "tools.format"),
    (with_tools(MCP), None),
    (with_tools({**SHELL, "name": "later", "defer_loading": True, "output_schema": {}}), "tools.defer_loading"),
    (with_tools({**SHELL, "name": "s", "async": True, "output_schema": {"a": 1}}), "tools.async, tools.output_schema"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice, tools.web_search"),
    (
        {**with_tools({"type": "web_search"}), "tool_choice": {"type": "web_search_preview"}},
        "tool_choice, tools.web_search",
    ),
    ({"tool_choice": {"type": "mcp", "server_label": "a", "name": "b"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}}, "tool_choice"),
    (
        with_items(reasoning(encrypted_content="abc"), {"role": "assistant", "content": "yes"}),
        "input.encrypted_content",
    ),
    (with_items({"type": "web_search_call", "id": "w", "status": "completed", "action": {}}), "input.web_search_call"),
    (with_items({"type": "compaction", "id": "c", "encrypted_content": "abc"}), "input.compaction"),
    (
        with_items(
            {"type": "mcp_list_tools", "id": "m", "server_label": "a", "tools": [{"name": "f", "input_schema": {}}]}
        ),
        "input.mcp_list_tools",
    ),
    (with_items({"type": "item_reference", "id": "rs_1"}), "input.item_reference"),
    (with_items({"id": "rs_1"}), "input.item_reference"),
    (
        with_items({"role": "assistant", "content": "a", "phase": "p", "parsed": {"a": 1}, "refusal": None}),
        "input.parsed",
    ),
    (with_items({"type": "additional_tools", "role": "developer", "tools": [MCP, SHELL]}), None),
]


@pytest.mark.parametrize(("fields", "ignored"), IGNORED, ids=lambda value: json.dumps(value)[:50])
def test_what_agents_send_is_accepted_and_named(api_server: RunningServer, fields: Row, ignored: str | None) -> None:
    answer = api_server.post("/v1/responses", {**AGENT, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-chairlift-ignored") == ignored
    check_type(Response, answer.json())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"client_metdata": {}}, "client_metdata is unknown: did you mean client_metadata?"),
        ({"include": ["usage"]}, "include[0] must be 'message.output_text.logprobs', "),
        (
            {"tools": [{"type": "funtion", "name": "f"}]},
            "tools[0].type must be 'function', 'custom', 'namespace' or a hosted tool",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameter": {}}]},
            "tools[0].parameter is unknown: did you mean parameters?",
        ),
        ({"tools": [{**MCP, "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type must be one of 'function', "),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name is required"),
        (
            {"tool_choice": {"type": "any"}},
            "tool_choice.type must be 'function', 'custom', 'namespace', 'allowed_tools' or a hosted tool",
        ),
        ({"input": [{"type": "song"}]}, "input[0].type must be one of 'message', "),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "argment": ""}]},
            "input[0].arguments is req",
        ),
        ({"input": [{**HI, "nme": "x"}]}, "input[0].nme is unknown or not supported"),
        ({"input": [{**result("x"), "outputs": "x"}]}, "input[0].outputs is unknown"),
        ({"input": [{**HI, "role": "robot"}]}, "input[0].role must be 'user', 'assistant', 'system' or 'developer', "),
    ],
)
def test_what_is_misspelled_is_an_error(fields: Row, message: str) -> None:
    body = {**AGENT, **fields}
    with pytest.raises(ValidationError) as caught:
        ResponsesRequest.model_validate(body)
    assert validation_problem(ResponsesRequest, caught.value.errors(), body)[0].startswith(message)


def to_chat(**fields: Any) -> ChatCompletionRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields}).to_chat()


def messages_of(*items: Row, **fields: Any) -> list[Row]:
    return [message.model_dump(exclude_unset=True) for message in to_chat(input=[*items], **fields).messages]


def test_a_reference_to_an_item_with_text_is_an_error() -> None:
    with pytest.raises(UnknownItemError, match=r"Item with id 'msg_1' not found"):
        to_chat(input=[HI, {"type": "item_reference", "id": "msg_1"}])


def test_the_parts_of_an_answer_are_one_message() -> None:
    thought = reasoning(content=THOUGHT, summary=[{"type": "summary_text", "text": "hm"}])
    first, second = call("{}"), {**call("{"), "call_id": "c2"}
    (answer,) = messages_of(thought, {"role": "assistant", "content": "Well."}, first, second)
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Well.")
    assert [entry["function"]["arguments"] for entry in answer["tool_calls"]] == ["{}", "{"]
    assert messages_of(reasoning(content=THOUGHT), reasoning(content=THOUGHT), GO)[0]["reasoning_content"] == "hmhm"


def test_calls_and_results_of_tools_of_the_client_are_kept() -> None:
    action = {"type": "exec", "command": ["ls"], "env": {}}
    shell = {"type": "local_shell_call", "id": "s1", "status": "completed", "action": action}
    done = {"type": "local_shell_call_output", "id": "s1", "output": "a.txt"}
    answer, output = messages_of(shell, done)
    (entry,) = answer["tool_calls"]
    assert (entry["id"], entry["function"]["name"]) == ("s1", "local_shell")
    assert json.loads(entry["function"]["arguments"]) == action
    assert output == {"role": "tool", "tool_call_id": "s1", "content": "a.txt"}


def test_tools_of_namespaces_have_unambiguous_names() -> None:
    clash = {**SHELL, "name": "mcp__demo__weather"}
    long = {**MCP, "name": "n" * 100, "tools": [{**SHELL, "name": "t" * 100}, {**SHELL, "name": "t" * 101}]}
    items = [HI, call("{}", "weather", namespace="mcp__demo"), call("{}", "gone", namespace="old_"), result("1")]
    chat = to_chat(input=items, tools=[MCP, clash, long, PATCH])
    names = [tool.function.name for tool in chat.tools or []]
    assert names[:2] == ["mcp__demo__weather_2", "mcp__demo__weather"]
    assert len(set(names)) == 5
    assert max(map(len, names)) == 128
    calls = chat.messages[1].model_dump()["tool_calls"]
    assert [entry["function"]["name"] for entry in calls] == ["mcp__demo__weather_2", "old__gone"]
    patch = (chat.tools or [])[4].function
    assert patch.description == "Edits files.\n\n`input` follows this lark grammar:\nstart: /.+/"
    assert (patch.parameters or {})["required"] == ["input"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "function", "name": "shell"}, ["shell"]),
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "function", "name": "weather", "namespace": "mcp__demo"}, ["mcp__demo__weather"]),
        ({"type": "namespace", "name": "mcp__demo"}, ["mcp__demo__weather"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "namespace", "name": "mcp__demo"},
                    {"type": "custom", "name": "apply_patch"},
                    {"type": "image_generation"},
                ],
            },
            ["mcp__demo__weather", "apply_patch"],
        ),
    ],
)
def test_every_form_of_tool_choice(choice: Row, expected: list[str]) -> None:
    chosen = to_chat(tools=[SHELL, MCP, PATCH, {"type": "image_generation"}], tool_choice=choice).tool_choice
    assert chosen is not None
    dumped = chosen if isinstance(chosen, str) else chosen.model_dump()
    assert re.findall(r"'name': '(\w+)'", str(dumped)) == expected


def test_a_choice_of_a_namespace_is_one_of_its_tools() -> None:
    namespace = {**MCP, "tools": [SHELL, PATCH]}
    choice = to_chat(tools=[namespace], tool_choice={"type": "namespace", "name": MCP["name"]}).tool_choice
    assert isinstance(choice, AllowedToolsChoice)
    names = [tool.function.name for tool in choice.allowed_tools.tools]
    assert (choice.allowed_tools.mode, names) == ("required", ["mcp__demo__shell", "mcp__demo__apply_patch"])


def test_tools_of_namespaces_are_limited_and_unique() -> None:
    with pytest.raises(RequestError, match="at most 512 tools are allowed, including those of namespaces"):
        to_chat(tools=[{**MCP, "tools": [SHELL] * 100}] * 6)
    with pytest.raises(RequestError, match="names must be unique, but mcp__demo__weather occurs"):
        selected_tools(to_chat(tools=[MCP, MCP]).tools or [], None)


def events_of(server: RunningServer, body: Row) -> list[Row]:
    lines = server.post("/v1/responses", {**body, "stream": True}).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("num_bytes", [1, LARGE_BODY])
def test_a_call_carries_its_namespace(api_server: RunningServer, num_bytes: int) -> None:
    choice = {"type": "function", "name": "weather", "namespace": "mcp__demo"}
    other = {**FLAT_TOOLS[0], "output_schema": {"description": "x" * num_bytes}}
    body = {"input": "x", "tools": [other, MCP], "tool_choice": choice, "max_output_tokens": 40, "seed": 1}
    answer = api_server.post("/v1/responses", body).json()
    (item,) = answer["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__demo", "weather")
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    assert answer["tools"][1]["tools"][0]["name"] == "weather"
    added = next(event for event in events_of(api_server, body) if event["type"] == "response.output_item.added")
    assert (added["item"]["namespace"], added["item"]["name"]) == ("mcp__demo", "weather")
    again = api_server.post(
        "/v1/responses", {**body, "input": [HI, *answer["output"], {**result("5"), "call_id": item["call_id"]}]}
    )
    assert again.status_code == 200, again.text


@pytest.mark.parametrize(("limit", "status"), [(14, "incomplete"), (40, "completed")])
def test_a_call_of_a_custom_tool_has_text_as_its_input(api_server: RunningServer, limit: int, status: str) -> None:
    client = api_server.client()
    request: Row = {
        "model": "tiny",
        "input": "x",
        "tools": [{**PATCH, "format": None}],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "max_output_tokens": limit,
        "temperature": 0,
    }
    whole = raw(client.responses.create(**request))
    (item,) = whole["output"]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "apply_patch", status)
    assert CUSTOM_ARGUMENT not in item["input"]
    assert item["id"].startswith("ctc_")
    events = events_of(api_server, request)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    done = next(event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert "".join(deltas) == done["input"] == item["input"]
    assert events[-1]["response"]["output"][0]["input"] == item["input"]
    output = {**result("ok", "custom_tool_call_output"), "call_id": item["call_id"]}
    again = api_server.post("/v1/responses", {**request, "input": [HI, item, output], "tool_choice": "auto"})
    assert again.status_code == 200, again.text


def test_reasoning_is_also_a_summary(api_server: RunningServer) -> None:
    kwargs = {"enable_thinking": True}
    body = {"input": "x", "chat_template_kwargs": kwargs, "max_output_tokens": 6, "temperature": 0}
    (item,) = api_server.post("/v1/responses", body).json()["output"]
    assert item["summary"] == [{"type": "summary_text", "text": item["content"][0]["text"]}]
    events = events_of(api_server, body)
    names = [event["type"].removeprefix("response.") for event in events]
    order = ["output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta"]
    order += ["reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"]
    assert [name for name in dict.fromkeys(names) if name in order] == order
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_summary_text.delta"]
    done = next(event for event in events if event["type"] == "response.reasoning_summary_part.done")
    assert "".join(deltas) == done["part"]["text"] == item["content"][0]["text"]
    assert {event["summary_index"] for event in events if "reasoning_summary" in event["type"]} == {0}


class TextsOfItems(ItemCall[Any]):
    """Collects items without a server."""

    def __init__(self) -> None:
        self.ended_items, self.open_item = [], None

    def item_start(self, item: AnswerItem) -> bytes:
        return b""

    def item_delta(self, item: AnswerItem, text: str, positions: list[TokenLogprobs]) -> bytes:
        return text.encode()

    def item_end(self, item: AnswerItem) -> bytes:
        return b""

    def closing(self) -> bytes:
        return b""

    def finished(self) -> None:
        self.end("completed")


def test_a_message_after_a_call_begins_without_a_line_break() -> None:
    parser = ToolParser(TOOL_CALL_FORMATS["hermes"], frozenset("f"))
    items = TextsOfItems()
    for character in 'A\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nB\nC':
        items._write_parts(parser.feed(character), [])
    items.finished()
    assert [(item.kind, item.text) for item in items.ended_items] == [
        ("message", "A"),
        ("function_call", "{}"),
        ("message", "B\nC"),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "web_search", "filters": ["x"] * (1 << 17)}]},
        {"tools": [{**SHELL, "output_schema": {"enum": ["x"] * (1 << 17)}}]},
        {"tool_choice": {"type": "mcp", "names": ["x"] * (1 << 17)}},
    ],
    ids=["hosted", "output_schema", "choice"],
)
def test_the_tools_that_a_response_repeats_are_limited(fields: Row) -> None:
    with pytest.raises(RequestError, match="bytes as JSON, but at most 524288 are allowed"):
        to_chat(**fields)
