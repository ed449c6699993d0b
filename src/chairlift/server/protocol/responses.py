"""The request and response bodies of /v1/responses, for text and function tools."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from chairlift.errors import RequestError
from chairlift.server.protocol.base import RequestBody, Timings, omitted_if_null
from chairlift.server.protocol.chat import ChatCompletionRequest
from chairlift.server.protocol.compatibility_fields import ResponsesCompatibilityFields
from chairlift.server.protocol.item_limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOLS, Metadata
from chairlift.server.protocol.sampling import EngineFields, JsonObjectFormat, StopStrings, TextFormat
from chairlift.server.protocol.tools import ToolName

LOGPROBS = "message.output_text.logprobs"

RESPONSES_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Name of a field of chats -> its name at this endpoint."""

ReturnedValue = Annotated[Any, Field(description="Part of a received item; has no effect.")]


class InputPart(RequestBody):
    type: Literal["input_text", "output_text", "refusal", "reasoning_text", "summary_text"]
    text: str = ""
    refusal: str = ""
    annotations: ReturnedValue = None
    logprobs: ReturnedValue = None


InputParts = Annotated[list[InputPart], Field(max_length=MAX_CONTENT_PARTS)]


def _joined_text(content: str | list[InputPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content or [])


class ReceivedItem(RequestBody):
    """An item that may have been received in a response."""

    id: ReturnedValue = None
    status: ReturnedValue = None


class InputMessage(ReceivedItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts
    phase: ReturnedValue = None


class InputFunctionCall(ReceivedItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None
    caller: ReturnedValue = None


class InputFunctionCallOutput(ReceivedItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str | InputParts


class InputReasoning(ReceivedItem):
    type: Literal["reasoning"]
    summary: Annotated[InputParts, Field(default_factory=list)]
    content: InputParts | None = None
    encrypted_content: None = None


def _item_type(item: Any) -> str:
    """The type of an input item; the default is a message."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputFunctionCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_item_type),
]


class ResponsesTool(RequestBody):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(RequestBody):
    type: Literal["function"]
    name: ToolName


class ResponsesAllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponsesNamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


ResponsesToolChoice = Literal["none", "auto", "required"] | ResponsesNamedTool | ResponsesAllowedTools


class ResponsesSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = Field(None, description="Has no effect: the schema is always followed.")


class ResponsesText(RequestBody):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Has no effect: the verbosity cannot be changed."
    )


class ResponsesReasoning(RequestBody):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(
        None, description="Has no effect: reasoning is returned in full, not as a summary."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="As `summary`.")
    mode: None = None
    context: None = None


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: Literal[False] | None = Field(None, description="Obfuscation of event sizes is not supported.")


class ResponsesRequest(EngineFields, ResponsesCompatibilityFields):
    """The body of POST /v1/responses."""

    # Tools and instructions are not among these, because the response repeats them.
    content_fields: ClassVar[dict[str, Any]] = {"input": ""}
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponsesText | None = None
    reasoning: ResponsesReasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        None,
        max_length=16,
        description="Additional output. `reasoning.encrypted_content` has no effect: reasoning is plain text.",
    )
    top_logprobs: int | None = None
    metadata: Metadata | None = Field(None, description="Returned unchanged.")
    stream_options: ResponsesStreamOptions | None = None
    # -- fields of vLLM --
    stop: str | StopStrings | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chat_field_names(self) -> dict[str, str]:
        return RESPONSES_FIELDS

    def ignored_fields(self) -> list[str]:
        found = super().ignored_fields()
        if self.reasoning is not None and (self.reasoning.summary or self.reasoning.generate_summary):
            found.append("reasoning.summary")
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            found.append("text.verbosity")
        return found

    @property
    def include_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])

    def to_chat(self) -> ChatCompletionRequest:
        """The corresponding chat request; raises RequestError."""
        if self.top_logprobs is not None and not self.include_logprobs:
            raise RequestError(f"top_logprobs is only allowed with include: [{LOGPROBS!r}]", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", "stream_options")
        fields: dict[str, Any] = {
            **self.engine_fields(),
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": self.include_logprobs,
            "top_logprobs": self.top_logprobs,
            "response_format": self._response_format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "stop": self.stop,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatCompletionRequest.from_fields(fields, self.structured_outputs)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            _append_to_chat(messages, item)
        return messages

    def _tool_choice(self) -> Any:
        choice = self.tool_choice
        if isinstance(choice, ResponsesNamedTool):
            return _chat_tool_choice(choice)
        if isinstance(choice, ResponsesAllowedTools):
            allowed = {"mode": choice.mode, "tools": [_chat_tool_choice(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        return choice

    def _response_format(self) -> Any:
        form = None if self.text is None else self.text.format
        if isinstance(form, ResponsesSchemaFormat):
            return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}
        return None if form is None else form.model_dump()


def _chat_tool(tool: ResponsesTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_tool_choice(tool: ResponsesNamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _append_to_chat(
    messages: list[dict[str, Any]], item: InputMessage | InputFunctionCall | InputFunctionCallOutput | InputReasoning
) -> None:
    """Append an item to the messages of a chat, where reasoning, content and calls of an answer are one message."""
    if isinstance(item, InputFunctionCallOutput):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined_text(item.output)})
    elif isinstance(item, InputReasoning):
        messages.append({"role": "assistant", "reasoning_content": _joined_text(item.content or item.summary)})
    elif isinstance(item, InputFunctionCall):
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        _last_answer(messages, lacking="").setdefault("tool_calls", []).append(call)
    elif item.role == "assistant":
        _last_answer(messages, lacking="content")["content"] = _joined_text(item.content)
    else:
        messages.append({"role": item.role, "content": _joined_text(item.content)})


def _last_answer(messages: list[dict[str, Any]], lacking: str) -> dict[str, Any]:
    """The answer to add the part `lacking` to: the last message if it is an answer without it, otherwise a new one."""
    if not messages or messages[-1]["role"] != "assistant" or lacking in messages[-1]:
        messages.append({"role": "assistant"})
    return messages[-1]


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. A stream sends it at its beginning and at its end. The items of `output` are messages, function calls
    and reasoning. Fields that are always null belong to features that are not supported; clients read them."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = omitted_if_null()
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = omitted_if_null()
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    access_programs: None = None
    conversation: None = None
    image: None = None
    input_transformations: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_diagnostics: None = None
    prompt_cache_options: None = None
    tool_usage: None = None
    timings: Timings | None = omitted_if_null()
