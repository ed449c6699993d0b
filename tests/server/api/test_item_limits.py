"""Limits on the number of items in one request: each is reported with the field, the limit and the number."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from chairlift.errors import RequestError
from chairlift.sampling_params import MAX_BAD_WORD_CHARACTERS, MAX_STOP_CHARACTERS, SamplingParams
from chairlift.server.api.tokenization import TokenizeRequest
from chairlift.server.protocol.base import (
    MAX_CONTENT_PARTS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_PROMPTS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
)
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.completions import CompletionRequest
from chairlift.server.protocol.messages import MessagesRequest
from chairlift.server.protocol.responses import ResponsesRequest
from chairlift.server.protocol.tools import FunctionTool, selected_tools
from chairlift.server.protocol.validation_errors import validation_problem

USER = {"role": "user", "content": "x"}
TEXT = {"type": "text", "text": "x"}
REQUIRED: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "x"},
    MessagesRequest: {"messages": [USER], "max_tokens": 1},
    ResponsesRequest: {"input": "x"},
    TokenizeRequest: {},
}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def reported(body_type: type[BaseModel], body: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(ValidationError) as caught:
        body_type.model_validate(body)
    return validation_problem(body_type, caught.value.errors(), body)


@pytest.mark.parametrize(
    ("body_type", "field", "item", "limit"),
    [
        (ChatCompletionRequest, "messages", USER, MAX_MESSAGES),
        (ChatCompletionRequest, "tools", tool("f"), MAX_TOOLS),
        (ChatCompletionRequest, "documents", {"text": "x"}, MAX_DOCUMENTS),
        (ChatCompletionRequest, "stop", "x", 64),
        (ChatCompletionRequest, "bad_words", "x", 256),
        (ChatCompletionRequest, "stop_token_ids", 1, 1 << 19),
        (CompletionRequest, "prompt", "x", MAX_PROMPTS),
        (CompletionRequest, "prompt", [1], MAX_PROMPTS),
        (MessagesRequest, "messages", USER, MAX_MESSAGES),
        (MessagesRequest, "stop_sequences", "x", 64),
        (MessagesRequest, "system", TEXT, MAX_CONTENT_PARTS),
        (ResponsesRequest, "input", {"role": "user", "content": "x"}, MAX_MESSAGES),
        (ResponsesRequest, "tools", {"type": "function", "name": "f"}, MAX_TOOLS),
        (TokenizeRequest, "messages", USER, MAX_MESSAGES),
    ],
)
def test_a_list_over_its_limit_is_reported(body_type: type[BaseModel], field: str, item: Any, limit: int) -> None:
    body = REQUIRED[body_type]
    message, param = reported(body_type, {**body, field: [item] * (limit + 1)})
    assert (message, param) == (f"{field} must have at most {limit} entries, got {limit + 1}", field)
    body_type.model_validate({**body, field: [item] * limit})


@pytest.mark.parametrize(
    ("messages", "path", "limit"),
    [
        ([{"role": "user", "content": [TEXT] * (MAX_CONTENT_PARTS + 1)}], "messages[0].content", MAX_CONTENT_PARTS),
        (
            [{"role": "assistant", "tool_calls": [CALL] * (MAX_TOOL_CALLS + 1)}],
            "messages[0].tool_calls",
            MAX_TOOL_CALLS,
        ),
    ],
)
def test_a_list_inside_a_message_is_reported_with_its_path(messages: list[Any], path: str, limit: int) -> None:
    message, _ = reported(ChatCompletionRequest, {"messages": messages})
    assert message == f"{path} must have at most {limit} entries, got {limit + 1}"


def test_metadata_has_the_limits_of_openai() -> None:
    pairs = {str(number): "x" for number in range(MAX_METADATA + 1)}
    message, _ = reported(ResponsesRequest, {"input": "x", "metadata": pairs})
    assert message == "metadata must have at most 16 entries, got 17"
    message, _ = reported(ResponsesRequest, {"input": "x", "metadata": {"a": "x" * 513}})
    assert "must have at most 512 characters" in message


def test_names_of_tools_are_unique() -> None:
    tools = [FunctionTool.model_validate(tool(f"f{number % 3}")) for number in range(5)]
    with pytest.raises(RequestError, match="tools: names must be unique, but f0, f1"):
        selected_tools(tools, None)


def test_definitions_of_tools_have_a_limit_on_their_size() -> None:
    half = "x" * (MAX_TOOLS_BYTES // 2)
    tools = [FunctionTool.model_validate(tool(f"f{number}", description=half)) for number in range(2)]
    selected_tools(tools[:1], None)
    with pytest.raises(RequestError, match=rf"the 2 tools have \d+ bytes as JSON, but at most {MAX_TOOLS_BYTES}"):
        selected_tools(tools, None)


@pytest.mark.parametrize(("field", "limit"), [("stop", MAX_STOP_CHARACTERS), ("bad_words", MAX_BAD_WORD_CHARACTERS)])
def test_stop_strings_and_bad_words_have_a_limit_on_their_length(field: str, limit: int) -> None:
    half = "x" * (limit // 2)
    SamplingParams(**{field: [half, half]})
    with pytest.raises(RequestError, match=f"{field} must have at most {limit} characters in total, got {limit + 1}"):
        SamplingParams(**{field: [half, half, "x"]})
