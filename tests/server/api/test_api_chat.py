"""Tools, templates and reasoning in chats, with a tiny model whose answers are constrained."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from api_matrix import CALL_REGEX, HISTORY, MESSAGES, NAMED, OK_SCHEMA, TOOLS, WEATHER
from api_model import NO_THOUGHTS

from chairlift.server.tools.tool_instructions import with_described_tools
from support.case_loop import loop_over
from support.running_server import RunningServer


def chat(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 90, **fields}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return dict(choice)


def prompt(server: RunningServer, **fields: Any) -> str:
    tokens = server.post("/tokenize", {"messages": MESSAGES, **fields}).json()["tokens"]
    return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])


def error_of(server: RunningServer, **fields: Any) -> tuple[str, str]:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def test_a_call_is_separated_from_the_content(api_server: RunningServer) -> None:
    choice = chat(api_server, tools=TOOLS, structured_outputs={"regex": CALL_REGEX}, **NO_THOUGHTS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert set(json.loads(call["function"]["arguments"])) == {"n"}


def test_required_calls_follow_the_schemas(api_server: RunningServer) -> None:
    choice = chat(api_server, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, **NO_THOUGHTS)
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in WEATHER["properties"]["city"]["enum"]
    assert arguments["unit"] in ("C", "F")
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


def test_a_named_tool_is_called(api_server: RunningServer) -> None:
    choice = chat(api_server, tools=TOOLS, tool_choice=NAMED, **NO_THOUGHTS)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert set(json.loads(call["function"]["arguments"])) == {"city", "unit"}
    assert choice["finish_reason"] == "stop"


def test_calls_are_not_parsed_with_tool_choice_none(api_server: RunningServer) -> None:
    regex = {"regex": CALL_REGEX}
    choice = chat(api_server, tools=TOOLS, tool_choice="none", structured_outputs=regex, **NO_THOUGHTS)
    assert "<tool_call>" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


STRICT = [{"type": "function", "function": {"name": "add", "parameters": OK_SCHEMA, "strict": True}}, TOOLS[0]]


STRUCTURE = {"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": STRUCTURE}}
CHOICES: list[Any] = [None, "required", NAMED]


@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["not strict", "strict"])
@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named"])
def test_an_answer_with_tools_and_a_schema_is_a_call_or_follows_the_schema(
    api_server: RunningServer, choice: Any, tools: list[dict[str, Any]]
) -> None:
    fields = {"tools": tools, "tool_choice": choice, "response_format": FORMAT, "parallel_tool_calls": False}
    for seed in range(4):
        answer = chat(api_server, **fields, **NO_THOUGHTS, temperature=2, seed=seed, max_tokens=300)
        calls = answer["message"].get("tool_calls", [])
        assert calls or choice is None
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
        assert calls or json.loads(answer["message"]["content"]) == {"ok": 1}


def test_tools_and_a_schema_on_the_other_endpoints(api_server: RunningServer) -> None:
    function = {"name": "add", "parameters": OK_SCHEMA, "strict": True}
    responses = {"text": {"format": {"type": "json_schema", "name": "a", "schema": STRUCTURE}}, "input": "hi"}
    answer = api_server.post(
        "/v1/responses", {**responses, "tools": [{"type": "function", **function}], "max_output_tokens": 80}
    )
    assert answer.status_code == 200, answer.text
    tool = {"name": "add", "input_schema": {"type": "object", "properties": {"u": {"type": "string", "format": "url"}}}}
    messages = {"messages": MESSAGES[-1:], "tools": [tool], "max_tokens": 80, "tool_choice": {"type": "any"}}
    structure = {"output_config": {"format": {"type": "json_schema", "schema": STRUCTURE}}}
    answer = api_server.post("/v1/messages", {**messages, **structure})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-chairlift-ignored"] == "tools.add.properties.u.format"


def test_the_template_renders_tools_calls_and_results(api_server: RunningServer) -> None:
    text = prompt(api_server, messages=HISTORY, tools=TOOLS)
    assert '"name": "get_weather"' in text
    assert 'assistant: <tool_call>{"name": "add", "arguments": {"n": 1}}</tool_call>\ntool: sunny\n' in text


def test_reasoning_is_separated_from_the_content(api_server: RunningServer) -> None:
    thinking = {"enable_thinking": True}
    message = chat(api_server, chat_template_kwargs=thinking, max_tokens=6)["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert (
        "reasoning_content" not in chat(api_server, chat_template_kwargs=thinking, include_reasoning=False)["message"]
    )
    assert "reasoning_content" not in chat(api_server, max_tokens=6)["message"]


def test_the_last_message_is_continued(api_server: RunningServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert prompt(api_server, **fields) == "user: Hello\nassistant: Once upon"
    alone = chat(api_server, **fields, max_tokens=4)["message"]["content"]
    assert chat(api_server, **fields, echo=True, max_tokens=4)["message"]["content"] == "Once upon" + alone


@loop_over("content", ["", " \n", None, [], [{"type": "text", "text": ""}]])
def test_an_empty_last_message_is_continued_from_its_header(api_server: RunningServer, content: Any) -> None:
    fields = {"messages": [*MESSAGES, {"role": "assistant", "content": content}], "continue_final_message": True}
    assert prompt(api_server, **fields, add_generation_prompt=False) == "user: Hello\nassistant: "


def test_the_last_of_several_parts_is_continued(api_server: RunningServer) -> None:
    parts = [{"type": "text", "text": text} for text in ("Once", "", "upon")]
    fields = {"messages": [*MESSAGES, {"role": "assistant", "content": parts}], "continue_final_message": True}
    assert prompt(api_server, **fields, add_generation_prompt=False) == "user: Hello\nassistant: Once\nupon"


def test_variables_that_the_template_does_not_read_are_named(api_server: RunningServer) -> None:
    kwargs = {"chat_template_kwargs": {"frob": 1, "enable_thinking": False, "\n": 2, "thinking": None}}
    names = "chat_template_kwargs, chat_template_kwargs.frob, chat_template_kwargs.thinking"
    common = {"max_tokens": 2, "temperature": 0}
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES, **common}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
    ):
        for stream in (False, True):
            answer = api_server.post(path, {**body, **kwargs, "stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-chairlift-ignored"] == names
    assert prompt(api_server, messages=MESSAGES, chat_template_kwargs={"frob": 1}) == "user: Hello\nassistant: "


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "must name one"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "occurs more than once"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "one"),
    ({"chat_template": "{{ messages[0].content }}"}, "chat_template", "start the server with --chat-template FILE"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "use the fields of the request"),
    ({"continue_final_message": True}, "continue_final_message", "last message of the assistant"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "cannot both be true"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "tool_call_id"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls", "must be true or false"),
    ({"modalities": ["audio"]}, "modalities", "'text'"),
    ({"use_beam_search": True, "n": 2, "stream": True}, "use_beam_search", "cannot be streamed"),
    ({"use_beam_search": True, "n": 2, "top_p": 0.5}, "top_p", "cannot be combined with use_beam_search"),
    ({"guided_json": {}}, "guided_json", "use structured_outputs"),
    ({"best_of": 2}, "best_of", "best_of is unknown: leave it out, because answers are not ranked"),
    ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options", "must be false, got true"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "regex"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": 7}}}]},
     "tools", "'f' is strict, but parts of its schema cannot be followed: tools.f.type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"anyOf": [False]}}}],
      "tool_choice": "required"}, "tools", "tools: its schema cannot be compiled"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 7}}}},
     "response_format", "response_format: its schema cannot be compiled"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "expected"), INVALID, ids=lambda value: json.dumps(value)[:50])
def test_invalid_fields_are_rejected(
    api_server: RunningServer, fields: dict[str, Any], param: str, expected: str
) -> None:
    named, message = error_of(api_server, **fields)
    assert named == param, message
    assert expected in message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_usage_names_a_token_that_differs_with_the_text_around_it(
    api_server: RunningServer, path: str, stream: bool
) -> None:
    def cache_miss(time: str) -> dict[str, Any]:
        system = f"You know the time, which is {time}. Answer politely, and be brief."
        body: dict[str, Any] = {"cache_salt": f"{path} {stream}", "stream": stream}
        if path == "/v1/responses":
            body |= {"instructions": system, "input": "Hello", "max_output_tokens": 1}
        elif path == "/v1/messages":
            body |= {"system": system, "messages": MESSAGES, "max_tokens": 1}
        else:
            body |= {"messages": [{"role": "system", "content": system}, *MESSAGES], "max_tokens": 1}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
        text = api_server.post(path, body).text
        miss: dict[str, Any] = json.loads(re.findall(r'"cache_miss":(\{.*?\})', text)[-1])
        return miss

    assert cache_miss("12:34")["reason"] == "never_seen"
    miss = cache_miss("12:35")
    assert miss["reason"] == "differs"
    assert "12:35" in miss["text"]
    assert len(miss["text"]) < 40


def test_tools_are_described_in_messages_for_templates_without_tools() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"n": 1}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
    system, answer, result = with_described_tools(messages, [TOOLS[1]])
    assert system["content"].endswith("\n\nBe brief."), "prompts with the same tools have a common prefix"
    assert json.dumps(TOOLS[1]["function"]) in system["content"]
    assert answer == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>',
    }
    assert result == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    assert with_described_tools(MESSAGES, [TOOLS[1]])[0]["role"] == "system"
