"""The request and response bodies of /v1/messages, Anthropic's API, for text and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag

from chairlift.errors import ContextLengthError, RequestError
from chairlift.server.protocol.base import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheableObject,
    CacheMiss,
    ErrorInfo,
    ReceivedObject,
    RequestBody,
    Timings,
    field_of,
    omitted_if_null,
)
from chairlift.server.protocol.chat import BILLING_LINE, MAX_NAMED_KEYS, ChatCompletionRequest
from chairlift.server.protocol.compatibility_fields import AnyFields, MessagesCompatibilityFields
from chairlift.server.protocol.sampling import EngineFields, StopStrings
from chairlift.server.protocol.tools import ToolName
from chairlift.server.protocol.turns import with_combined_turns

ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""HTTP status -> the error type of Anthropic; the type of other statuses is `api_error`."""

HOSTED: Final = re.compile(
    r"redacted_thinking|fallback|tool_reference|mcp_tool(set|_use|_result|_listing)|server_tool_use|tool_search_tool_(bm25|regex)"
    r"|[a-z_]{1,40}_tool_result|[a-z][a-z0-9_]{0,40}_[0-9]{8}"
)
"""The types of blocks and tools that belong to Anthropic's service, such as `web_search_20250305`."""

NO_CHANGES: Final[tuple[Any, ...]] = (None, False, [], ["direct"])
"""The values of fields of tools that describe what the server does anyway."""


class Hosted(ReceivedObject):
    """A tool or a block that only Anthropic's service can execute or read. It is skipped.

    In the result of a call it may be a tool that a search has found, which is part of the prompt anyway.
    """

    type: str
    tool_name: str = ""

    @property
    def text(self) -> str:
        return self.tool_name


def _form(value: Any) -> str:
    """The type of a block or tool, or the first one of `Hosted`."""
    kind = field_of(value, "type")
    return "hosted" if isinstance(kind, str) and HOSTED.fullmatch(kind) else kind or "custom"


class TextBlock(CacheableObject):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, description="Part of a received block; has no effect.")
    parsed_output: Any = Field(None, description="Added by Anthropic's client; has no effect.")


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)]


class ToolUseBlock(CacheableObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = Field(description="An object, or a string with the arguments of a call that was cut.")
    caller: dict[str, Any] | None = Field(None, description="Part of a received block; has no effect.")
    toolset_name: str | None = Field(None, description="Part of a received block; has no effect.")


ResultBlock = Annotated[Annotated[TextBlock, Tag("text")] | Annotated[Hosted, Tag("hosted")], Discriminator(_form)]


class ToolResultBlock(CacheableObject):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    is_error: bool = False
    toolset_name: str | None = Field(None, description="Has no effect.")


class ThinkingBlock(RequestBody):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field("", description="Not checked.")


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[Hosted, Tag("hosted")],
    Discriminator(_form),
]


class MessageParam(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_CONTENT_PARTS)]


class MessagesTool(CacheableObject):
    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = Field(None, description="Has no effect: all tools are part of the prompt.")
    input_examples: list[Any] | None = Field(None, description="Has no effect: write them into the description.")
    allowed_callers: list[str] | None = Field(None, description="Has no effect: only the model calls tools.")
    eager_input_streaming: bool | None = Field(None, description="Has no effect: arguments are always streamed.")


Tool = Annotated[Annotated[MessagesTool, Tag("custom")] | Annotated[Hosted, Tag("hosted")], Discriminator(_form)]


class MessagesToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestBody):
    """Whether the model reasons, and with how many tokens at most."""

    type: Literal["adaptive", "enabled", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = Field(None, description="Has no effect.")
    block_binding: AnyFields | None = Field(None, description="Has no effect: thinking blocks are not checked.")


class JsonOutput(RequestBody):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(RequestBody):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None
    task_budget: dict[str, Any] | None = None


class ConversationFields(RequestBody):
    """The fields that define the prompt."""

    own_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config",
        "reasoning_effort": "output_config",
        "thinking_token_budget": "thinking.budget_tokens",
    }
    content_fields = ("messages", "system", "tools", "output_config", "output_format")
    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | TextBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = Field(None, description="An earlier name of `output_config.format`.")
    thread: dict[str, Any] | None = Field(None, description="Rejected: conversations are not stored.")

    def own_error(self, error: RequestError) -> RequestError:
        """As for other bodies. Anthropic's clients recognize the error for a prompt that is too long by its message."""
        if isinstance(error, ContextLengthError):
            message = f"prompt is too long: {error.num_tokens} tokens > {error.maximum} maximum"
            error = RequestError(message, error.param, error.code)
        return super().own_error(error)

    def to_chat(self) -> ChatCompletionRequest:
        """The corresponding chat request; raises RequestError."""
        variables = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        return ChatCompletionRequest.from_fields(self.chat_fields(), **variables)

    def chat_fields(self) -> dict[str, Any]:
        """The corresponding fields of a chat request; raises RequestError."""
        if self.thread is not None:
            message = "thread is not supported, because conversations are not stored: send the whole one without it"
            raise RequestError(message, "thread", "thread_unsupported_request")
        messages = self._chat_messages()
        last = messages[-1] if messages else {}
        is_answer = last.get("role") == "assistant" and "tool_calls" not in last
        continues = is_answer and bool(last.get("content", "").strip())
        config = self.output_config or OutputConfig()
        form = config.format or self.output_format
        schema = None if form is None else {"name": "output", "schema": form.schema_}
        return {
            "messages": messages,
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
            "tools": None if self.tools is None else [_function(tool) for tool in self._custom_tools()],
            "tool_choice": None if self.tool_choice is None else _choice(self.tool_choice),
            "parallel_tool_calls": not (self.tool_choice is not None and self.tool_choice.disable_parallel_tool_use),
            "reasoning_effort": config.effort,
            "thinking_token_budget": None if self.thinking is None else self.thinking.budget_tokens,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
        }

    def ignored_content(self) -> list[str]:
        lists = (message.content for message in self.messages if not isinstance(message.content, str))
        found = {f"messages.{block.type}" for blocks in lists for block in blocks if isinstance(block, Hosted)}
        found |= {f"tools.{tool.type}" for tool in self.tools or [] if isinstance(tool, Hosted)}
        for field in ("defer_loading", "input_examples", "allowed_callers"):
            found |= {f"tools.{field}" for tool in self._custom_tools() if getattr(tool, field) not in NO_CHANGES}
        found |= {f"thinking.{field}" for field in ("display", "block_binding") if getattr(self.thinking, field, None)}
        if self.output_config is not None and self.output_config.task_budget:
            found.add("output_config.task_budget")
        if self.system is not None and BILLING_LINE.match(_text(self.system)):
            found.add("x-anthropic-billing-header")
        return sorted(found)[:MAX_NAMED_KEYS]

    def _custom_tools(self) -> list[MessagesTool]:
        return [tool for tool in self.tools or [] if isinstance(tool, MessagesTool)]

    def _chat_messages(self) -> list[dict[str, Any]]:
        messages = with_combined_turns([part for message in self.messages for part in _messages(message)])
        if len(messages) > 1 and messages[-1] == {"role": "assistant", "content": ""}:
            messages.pop()  # An empty beginning of the answer.
        if self.system is None:
            return messages
        system = BILLING_LINE.sub("", given := _text(self.system))
        return messages if given and not system else [{"role": "system", "content": system}, *messages]


class CountTokensRequest(ConversationFields, MessagesCompatibilityFields):
    """The body of POST /v1/messages/count_tokens."""


class MessagesRequest(ConversationFields, EngineFields, MessagesCompatibilityFields):
    """The body of POST /v1/messages. `max_tokens` is an upper limit, because agents always send their model's limit."""

    clamps_max_tokens: ClassVar[bool] = True
    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: StopStrings | None = None

    @property
    def retention(self) -> str | None:
        blocks = self.system if isinstance(self.system, list) else []
        marks = (self.cache_control, *(block.cache_control for block in blocks))
        return self.prompt_cache_retention or next((mark.ttl for mark in marks if mark and mark.ttl == "1h"), None)

    def chat_fields(self) -> dict[str, Any]:
        own = {"max_tokens": self.max_tokens, "stop": self.stop_sequences}
        return {**self.engine_fields(), **super().chat_fields(), **own}


def _text(content: str | Sequence[TextBlock | Hosted] | None) -> str:
    return content if isinstance(content, str) else "\n".join(filter(None, (block.text for block in content or [])))


def _messages(message: MessageParam) -> list[dict[str, Any]]:
    """The corresponding messages of a chat, where each tool result is a separate message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = message.content
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    others: dict[str, Any] = {}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        others["reasoning_content"] = "".join(thoughts)
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        others["tool_calls"] = calls
    is_result = results and not texts and not others
    return (
        results
        if is_result
        else [*results, {"role": message.role, "content": "\n".join(filter(None, texts)), **others}]
    )


def _call(block: ToolUseBlock) -> dict[str, Any]:
    arguments = block.input if isinstance(block.input, str) else json.dumps(block.input)
    return {"id": block.id, "function": {"name": block.name, "arguments": arguments}}


def _function(tool: MessagesTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


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
    cache_miss: CacheMiss | None = omitted_if_null()


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
    details: dict[str, str] | None = omitted_if_null()


class MessagesError(BaseModel):
    """An error response, in the form of Anthropic."""

    type: Literal["error"] = "error"
    error: MessagesErrorInfo

    @classmethod
    def of(cls, status: int, info: ErrorInfo) -> Self:
        """The body of a response with an error."""
        details = None if info.code is None else {"error_code": info.code}
        kind = ERROR_TYPES.get(status, "api_error")
        return cls(error=MessagesErrorInfo(type=kind, message=info.message, details=details))
