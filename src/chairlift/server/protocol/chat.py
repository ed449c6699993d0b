"""The request and response bodies of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from chairlift.errors import RequestError
from chairlift.sampling_params import MAX_LOGPROBS
from chairlift.server.protocol.base import RequestBody, Timings, UsageInfo, omitted_if_null
from chairlift.server.protocol.compatibility_fields import ChatCompatibilityFields
from chairlift.server.protocol.item_limits import (
    MAX_CONTENT_PARTS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
)
from chairlift.server.protocol.sampling import SamplingFields, StructuredOutputsField
from chairlift.server.protocol.tools import FunctionTool, ToolCall, ToolCallParam, ToolChoice
from chairlift.server.protocol.validation_errors import describe_validation_errors

RESERVED_VARIABLES = ("messages", "self", "add_generation_prompt", "tools", "documents", "reasoning_effort")
"""Variables of a chat template that `chat_template_kwargs` must not set."""


class TextPart(RequestBody):
    type: Literal["text"]
    text: str


class RefusalPart(RequestBody):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Text = str | Annotated[list[TextPart], Field(max_length=MAX_CONTENT_PARTS)]


def plain_text(content: str | list[TextPart] | list[TextPart | RefusalPart]) -> str:
    """The content of a message as one string, as chat templates expect it."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class PromptMessage(RequestBody):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Text
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with its content as one string."""
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": plain_text(self.content)}
        return message if self.name is None else {**message, "name": self.name}


class ToolMessage(RequestBody):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        message = {"role": "tool", "content": plain_text(self.content), "tool_call_id": self.tool_call_id}
        return message if self.name is None else {**message, "name": self.name}


class AssistantMessage(RequestBody):
    """An earlier answer, which may be sent back as it was received."""

    role: Literal["assistant"]
    content: str | Annotated[list[TextPart | RefusalPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    # -- These fields of a received answer are null or empty. --
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with the arguments of tool calls as objects."""
        content = self.refusal if self.content is None else plain_text(self.content)
        if content is None and not self.tool_calls:
            raise RequestError("messages: a message of the assistant must have content or tool_calls", "messages")
        calls = [_call_for_template(call) for call in self.tool_calls or []] or None
        others = {"name": self.name, "reasoning_content": self.reasoning_content, "tool_calls": calls}
        given = {name: value for name, value in others.items() if value is not None}
        return {"role": "assistant", "content": content or "", **given}


def _call_for_template(call: ToolCallParam) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"messages: the arguments of tool call {call.id!r} are not valid JSON: {error}", "messages"
        ) from None
    if not isinstance(arguments, dict):
        raise RequestError(f"messages: the arguments of tool call {call.id!r} must be a JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


ChatMessage = Annotated[PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatCompletionRequest(SamplingFields, ChatCompatibilityFields):
    """The body of POST /v1/chat/completions."""

    content_fields: ClassVar[dict[str, Any]] = {
        "messages": [],
        "tools": None,
        "documents": None,
        "chat_template": None,
        "chat_template_kwargs": None,
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: at most one tool call.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For models whose chat template reads this variable."
    )
    # -- fields of vLLM --
    include_reasoning: bool | None = Field(None, description="false: omit `reasoning_content` from the answer.")
    chat_template: str | None = Field(None, description="Rejected: the server is started with a template.")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    _optional_variables: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def from_fields(
        cls,
        fields: dict[str, Any],
        structured_outputs: StructuredOutputsField | None = None,
        optional_variables: dict[str, Any] | None = None,
    ) -> ChatCompletionRequest:
        """The request with these fields, converted from another API; raises RequestError if they are invalid.

        Args:
            optional_variables: variables of the chat template that are set if it reads them.
        """
        try:
            chat = cls.model_validate({**fields, "structured_outputs": None})
        except ValidationError as error:
            message, field = describe_validation_errors(error.errors(), fields)
            raise RequestError(f"converted to a chat: {message}", field) from None
        chat.structured_outputs = structured_outputs
        chat._optional_variables = optional_variables or {}
        return chat

    def to_chat(self) -> ChatCompletionRequest:
        """The request itself, because other conversations are converted to this form."""
        return self

    def output_limit(self) -> int | None:
        """The maximum number of output tokens; None if only the context limits it."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} disagree: "
                "send only one of them",
                "max_completion_tokens",
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def chat_field_names(self) -> dict[str, str]:
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}

    def template_variables(self, names: Collection[str]) -> dict[str, Any]:
        """The variables besides messages and tools for a chat template that reads the variables `names`."""
        options = self.chat_template_kwargs or {}
        if reserved := set(RESERVED_VARIABLES) & options.keys():
            raise RequestError(
                f"chat_template_kwargs must not contain {', '.join(sorted(reserved))}: use the fields of the request",
                "chat_template_kwargs",
            )
        fields = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        given = {name: value for name, value in fields.items() if value is not None}
        return {name: value for name, value in self._optional_variables.items() if name in names} | options | given

    def num_logprobs(self) -> int | None:
        """The number of alternative tokens to return at each position; None to return no logprobs."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}"
            raise RequestError(message, "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class ChatResponseMessage(BaseModel):
    """The generated message. `content` is null if the answer consists of tool calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = omitted_if_null()
    reasoning_content: str | None = omitted_if_null()


class ChatCompletionResponseChoice(BaseModel):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = omitted_if_null()


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = omitted_if_null()
    prompt_token_ids: list[int] | None = omitted_if_null()
    timings: Timings | None = omitted_if_null()
