"""Invalid bodies: the error names the first invalid field with its path, and validation ends at the first errors."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from chairlift.server.api.pooling import EmbeddingRequest
from chairlift.server.api.tokenization import DetokenizeRequest, TokenizeRequest
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.completions import CompletionRequest
from chairlift.server.protocol.messages import MessagesRequest
from chairlift.server.protocol.responses import ResponsesRequest
from chairlift.server.protocol.validation_errors import validation_problem

MANY = 1000
CHAT = {"messages": [{"role": "user", "content": "x"}]}
WRONG: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [None] * MANY}),
    (CompletionRequest, {"prompt": [[None] * MANY]}),
    (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "x", "logit_bias": {str(n): "x" for n in range(2000)}}),
    (CompletionRequest, {"prompt": "x", **{f"unknown{n}": 1 for n in range(MANY)}}),
    (ChatCompletionRequest, {"messages": [1] * MANY}),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatCompletionRequest, {"messages": [{"role": "user", **{f"unknown{n}": 1 for n in range(MANY)}}]}),
    (ChatCompletionRequest, {**CHAT, "tools": [1] * MANY}),
    (MessagesRequest, {"model": "m", "max_tokens": 1, "messages": [1] * MANY}),
    (ResponsesRequest, {"input": [1] * MANY}),
    (TokenizeRequest, {"messages": [1] * MANY}),
    (DetokenizeRequest, {"tokens": ["x"] * MANY}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG)
def test_the_number_of_errors_does_not_grow_with_the_body(kind: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 40


def test_long_lists_of_valid_items_are_accepted() -> None:
    assert CompletionRequest(prompt=[1] * MANY).prompt == [1] * MANY
    assert CompletionRequest(prompt=["x"] * MANY).prompt == ["x"] * MANY
    assert CompletionRequest(prompt=[[1, 2]] * MANY).prompt == [[1, 2]] * MANY
    assert len(CompletionRequest(prompt="x", logit_bias={str(n): 1.0 for n in range(1024)}).logit_bias or ()) == 1024


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
SCHEMA = {"name": "x", "schema": {}}


def chat(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}], **fields}


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        (
            ChatCompletionRequest,
            chat([{"type": "text", "text": "x"}, IMAGE]),
            "messages[0].content[1].type must be 'text', got 'image_url': this server reads text only; leave this part "
            "out",
        ),
        (
            ChatCompletionRequest,
            chat([IMAGE], "assistant"),
            "messages[0].content[0].type must be one of 'text', 'refusal', 'thinking', got 'image_url': this "
            "server reads text only; leave this part out",
        ),
        (
            ChatCompletionRequest,
            chat([{"type": "text", "text": 5}], "assistant"),
            "messages[0].content[0].text must be a string, got 5",
        ),
        (
            ChatCompletionRequest,
            chat("x", "robot"),
            "messages[0].role must be one of 'system', 'developer', 'user', 'assistant', 'tool', got 'robot'",
        ),
        (ChatCompletionRequest, {"messages": [{"role": "user"}]}, "messages[0].content is required"),
        (ChatCompletionRequest, {"messages": [{"content": "x"}]}, "messages[0].role is required"),
        (
            ChatCompletionRequest,
            chat("x", response_format={"type": "json_schema", "json_schema": {"json_schema": SCHEMA}}),
            "response_format.json_schema.name is required; response_format.json_schema.json_schema is unknown or not "
            "supported: leave it out",
        ),
        (
            ChatCompletionRequest,
            chat("x", response_format={"type": "json_schema", **SCHEMA}),
            "response_format.json_schema is required; response_format.name is unknown or not supported: leave it "
            "out; response_format.schema is unknown or not supported: leave it out",
        ),
        (ChatCompletionRequest, chat("x", tool_choice={"type": "function"}), "tool_choice.function is required"),
        (
            ChatCompletionRequest,
            chat("x", tool_choice="maybe"),
            "tool_choice must be 'none', 'auto' or 'required' or an object, got 'maybe'",
        ),
        (CompletionRequest, {"prompt": 5}, "prompt must be a string or a list, got 5"),
        (CompletionRequest, {"prompt": [None]}, "prompt[0] must be a string or an integer or a list, got null"),
        (CompletionRequest, {}, "prompt is required"),
        (
            CompletionRequest,
            {"messages": [{"role": "user", "content": "x"}]},
            "prompt is required, got messages, which is a field of /v1/chat/completions: send it there",
        ),
        (
            ChatCompletionRequest,
            {"prompt": "x"},
            "messages is required, got prompt, which is a field of /v1/completions: send it there",
        ),
        (ChatCompletionRequest, {"messages": [{"role": "user"}], "prompt": "x"}, "messages[0].content is required"),
        (CompletionRequest, {"prompt": "x", "timeout": float("nan")}, "timeout must be a finite number, got NaN"),
        (CompletionRequest, {"prompt": "x", "timeout": float("inf")}, "timeout must be a finite number, got Infinity"),
        (ResponsesRequest, {"input": "x", "max_tokens": 9}, "max_tokens is unknown: did you mean max_output_tokens?"),
        (EmbeddingRequest, {"input": "x", "max_tokens": 9}, "max_tokens is unknown or not supported: leave it out"),
        (
            ResponsesRequest,
            {"input": "x", "conversation": "conv_1"},
            "conversation is not supported: leave it out. Conversations are not stored.",
        ),
        (
            ChatCompletionRequest,
            {**CHAT, "functions": [{"name": "f"}]},
            "functions is not supported: leave it out. Deprecated by OpenAI; use `tools`.",
        ),
        (
            MessagesRequest,
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type must be 'text', 'tool_use', 'tool_result', 'thinking' or the type of "
            "a hosted tool, got 'image': this server reads text only; leave this part out",
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input[0].content[0].type must be 'input_text', 'output_text', 'refusal', 'reasoning_text', 'summary_text' "
            "or 'text', got 'input_image': this server reads text only; leave this part out",
        ),
        (ChatCompletionRequest, {**CHAT, "audio": {}}, "audio is not supported: leave it out"),
        (
            CompletionRequest,
            {"prompt": "x", "suffix": "end"},
            "suffix must be '', got 'end'. Insertion before a suffix is not supported.",
        ),
        (
            ResponsesRequest,
            {"input": "x", "truncation": "middle"},
            "truncation must be 'disabled' or 'auto', got 'middle'",
        ),
        (EmbeddingRequest, {"input": "x", "timeout": 0}, "timeout must be greater than 0, got 0"),
        (CompletionRequest, {"prompt": "x", "stop": {}}, "stop must be a string or a list, got {}"),
        (
            CompletionRequest,
            {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(1025)), 1.0)},
            "logit_bias must have at most 1024 entries, got 1025",
        ),
        (
            ResponsesRequest,
            {"input": [{"type": "song"}]},
            "input[0].type must be one of 'message', 'function_call', 'custom_tool_call', 'function_call_output', "
            "'reasoning', 'item_reference', 'web_search_call', 'additional_tools', got 'song'",
        ),
    ],
)
def test_an_error_has_the_path_of_the_field(kind: type[BaseModel], body: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    message, field = validation_problem(kind, caught.value.errors(), body)
    assert message == expected
    assert field == re.split(r"[\[. ]", expected)[0]


def test_a_very_long_name_of_a_field_is_shortened() -> None:
    body = {**CHAT, "x" * 1_000_000: 1}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    message, field = validation_problem(ChatCompletionRequest, caught.value.errors(), body)
    assert message.startswith("xxx")
    assert len(message) < 200
    assert len(field) < 200


NAMES = ("type", "role", "content", "text", "user", "json_schema", "name", "schema", "function", "str", "messages")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner),
    max_leaves=8,
)


@given(
    field=st.sampled_from(("messages", "response_format", "tools", "tool_choice", "stop", "structured_outputs")),
    value=JSON,
)
@settings(max_examples=150, deadline=None)
def test_errors_never_contain_the_names_of_classes(field: str, value: Any) -> None:
    body = {**CHAT, field: value}
    try:
        ChatCompletionRequest.model_validate(body)
    except ValidationError as error:
        message, named = validation_problem(ChatCompletionRequest, error.errors(), body)
        assert named == field
        assert message.startswith(field)
        path = re.split(" must | is ", message)[0]
        assert not re.search(r"list\[|Part|Tool|Format|Message", path.removeprefix(field))
