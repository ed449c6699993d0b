"""The request and response bodies of /v1/messages, Anthropic's API, for text and tools."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from chairlift.server.protocol.base import RequestBody, Timings, omitted_if_null
from chairlift.server.protocol.chat import ChatCompletionRequest, without_billing_line
from chairlift.server.protocol.compatibility_fields import CacheControl, MessagesCompatibilityFields
from chairlift.server.protocol.item_limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOLS
from chairlift.server.protocol.sampling import EngineFields, StopStrings
from chairlift.server.protocol.tools import ToolName
from chairlift.server.protocol.turns import combine_turns

MESSAGES_FIELDS = {"stop": "stop_sequences", "response_format": "output_config", "reasoning_effort": "output_config"}
"""Name of a field of chats -> its name at this endpoint."""


class TextBlock(RequestBody):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)]


class ToolUseBlock(RequestBody):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = Field(None, description="Part of a received block; has no effect.")


class ToolResultBlock(RequestBody):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None
    is_error: bool = False
    cache_control: CacheControl | None = None


class ThinkingBlock(RequestBody):
    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="Not checked.")


Blocks = list[Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock, Field(discriminator="type")]]


class MessageParam(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[Blocks, Field(max_length=MAX_CONTENT_PARTS)]


class MessagesTool(RequestBody):
    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    defer_loading: Literal[False] | None = Field(None, description="All tools are part of the prompt.")
    eager_input_streaming: bool | None = Field(None, description="Has no effect: arguments are always streamed.")


class MessagesToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody):
    """Whether the model reasons. `enabled` is rejected, because a token budget for reasoning is not supported."""

    type: Literal["adaptive", "disabled"]


class JsonOutput(RequestBody):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class ConversationFields(RequestBody):
    """The fields that define the prompt."""

    content_fields: ClassVar[dict[str, Any]] = {"messages": [], "system": None, "tools": None}
    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def chat_field_names(self) -> dict[str, str]:
        return MESSAGES_FIELDS

    @property
    def optional_variables(self) -> dict[str, Any]:
        """The variables of the chat template that `thinking` sets, if the template reads them."""
        return {} if self.thinking is None else {"enable_thinking": self.thinking.type == "adaptive"}

    def chat_fields(self) -> dict[str, Any]:
        """The corresponding fields of a chat request."""
        messages = self._chat_messages()
        last = messages[-1] if messages else {}
        continues = (
            last.get("role") == "assistant" and bool(last.get("content", "").strip()) and "tool_calls" not in last
        )
        config = self.output_config or OutputConfig()
        schema = None if config.format is None else {"name": "output", "schema": config.format.schema_}
        return {
            "messages": messages,
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "tools": None if self.tools is None else [_function(tool) for tool in self.tools],
            "tool_choice": None if self.tool_choice is None else _choice(self.tool_choice),
            "parallel_tool_calls": not (self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use),
            "reasoning_effort": config.effort,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
        }

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages = combine_turns([part for message in self.messages for part in _messages(message)])
        if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()  # An empty beginning of the answer.
        given = None if self.system is None else _text(self.system)
        system = without_billing_line(given or "")
        return (
            messages if given is None or (given and not system) else [{"role": "system", "content": system}, *messages]
        )


class CountTokensRequest(ConversationFields, MessagesCompatibilityFields):
    """The body of POST /v1/messages/count_tokens."""

    content_fields: ClassVar[dict[str, Any]] = {**ConversationFields.content_fields, "output_config": None}

    def to_chat(self) -> ChatCompletionRequest:
        """The corresponding chat request; raises RequestError."""
        return ChatCompletionRequest.from_fields(self.chat_fields(), None, self.optional_variables)


class MessagesRequest(ConversationFields, EngineFields, MessagesCompatibilityFields):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopStrings | None = None

    def to_chat(self) -> ChatCompletionRequest:
        """The corresponding chat request; raises RequestError."""
        fields = {
            **self.engine_fields(),
            **self.chat_fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
        }
        return ChatCompletionRequest.from_fields(fields, self.structured_outputs, self.optional_variables)


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])


def _messages(message: MessageParam) -> list[dict[str, Any]]:
    """The corresponding messages of a chat, where each tool result is a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    other: dict[str, Any] = {"role": message.role}
    results: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            other.setdefault("tool_calls", []).append({"id": block.id, "function": function})
        else:
            name, text = (
                ("content", block.text) if isinstance(block, TextBlock) else ("reasoning_content", block.thinking)
            )
            other[name] = other.get(name, "") + text
    return results if results and len(other) == 1 else [*results, {"content": "", **other}]


def _function(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or "?"}}
    return "required" if choice.type == "any" else choice.type


class MessagesUsage(BaseModel):
    """Token counts. `input_tokens` does not include cached tokens."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(BaseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage
    timings: Timings | None = omitted_if_null()


class TokenCount(BaseModel):
    input_tokens: int


class MessagesErrorInfo(BaseModel):
    type: str
    message: str


class MessagesError(BaseModel):
    """An error response, in the form of Anthropic."""

    type: Literal["error"] = "error"
    error: MessagesErrorInfo
