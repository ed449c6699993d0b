"""The request and response bodies of /v1/chat/completions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, Field, PrivateAttr, ValidationError

from chairlift.errors import RequestError
from chairlift.loading.text.chat_template import RESERVED_VARIABLES, TextParts
from chairlift.sampling_params import MAX_LOGPROBS
from chairlift.server.protocol.base import (
    MAX_CONTENT_PARTS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    CacheableObject,
    ReceivedObject,
    Timings,
    UsageInfo,
    example_bodies,
    omitted_if_null,
)
from chairlift.server.protocol.compatibility_fields import ChatCompatibilityFields
from chairlift.server.protocol.sampling import SamplingFields
from chairlift.server.protocol.tools import FunctionTool, ToolCall, ToolCallParam, ToolChoice
from chairlift.server.protocol.turns import with_one_leading_system
from chairlift.server.protocol.validation_errors import validation_problem

BILLING_LINE: Final = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n?", re.IGNORECASE)
"""The line at the beginning of Claude Code's system prompt that differs in each request, so that no prefix of a prompt
would be found in the cache. Only Anthropic reads it."""

NAMED_KEY: Final = re.compile(r"[\w.-]{1,64}", re.ASCII)
"""Additional fields of messages, and variables of templates, that `ignored_content` can name in a header."""
MAX_NAMED_KEYS: Final = 16


class TextPart(CacheableObject):
    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = Field(None, description="Has no effect: every prefix is cached.")


class AnswerText(TextPart, ReceivedObject):
    """A text of an earlier answer."""


class RefusalPart(ReceivedObject):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(ReceivedObject):
    """Reasoning as a part of the content, as some servers return it."""

    type: Literal["thinking"]
    thinking: str | list[TextPart]
    text: ClassVar[str] = ""

    @property
    def thought(self) -> str:
        return "".join(self.thinking if isinstance(self.thinking, str) else (part.text for part in self.thinking))


AnswerPart = Annotated[AnswerText | RefusalPart | ThinkingPart, Field(discriminator="type")]

Text = str | Annotated[list[TextPart], Field(max_length=MAX_CONTENT_PARTS)]


def content_text(content: str | Sequence[TextPart | RefusalPart | ThinkingPart]) -> str:
    """The content of a message as one string, which keeps its parts for chat templates that read them."""
    return content if isinstance(content, str) else TextParts(part.text for part in content)


class PromptMessage(CacheableObject):
    """A message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Text
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with its content as one string."""
        if self.role == "user":
            message = {"role": "user", "content": content_text(self.content)}
        else:
            message = {"role": "system", "content": self._system_text()}
        return message if self.name is None else {**message, "name": self.name}

    def _system_text(self) -> str:
        texts = [BILLING_LINE.sub("", text) for text in self.texts()]
        return texts[0] if isinstance(self.content, str) else TextParts(texts)

    def texts(self) -> list[str]:
        return [self.content] if isinstance(self.content, str) else [part.text for part in self.content]


class ToolMessage(CacheableObject):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Text
    tool_call_id: str
    name: str | None = None

    def for_template(self) -> dict[str, Any]:
        message = {"role": "tool", "content": content_text(self.content), "tool_call_id": self.tool_call_id}
        return message if self.name is None else {**message, "name": self.name}


class AssistantMessage(CacheableObject, ReceivedObject):
    """An earlier answer, which may be sent back as it was received, cut or empty. `reasoning` is vLLM's name of
    `reasoning_content`."""

    role: Literal["assistant"]
    content: str | Annotated[list[AnswerPart], Field(max_length=MAX_CONTENT_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(max_length=MAX_TOOL_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    # -- These fields of a received answer are null, because a call or speech would be lost without them. --
    function_call: None = None
    audio: None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it, with the arguments of tool calls as objects."""
        content = self.refusal if self.content is None else content_text(self.content)
        calls = [call.for_template() for call in self.tool_calls or []]
        others = {"name": self.name, "reasoning_content": self._reasoning_text(), "tool_calls": calls or None}
        given = {name: value for name, value in others.items() if value is not None}
        return {"role": "assistant", "content": content or "", **given}

    def ignored_keys(self) -> Iterator[str]:
        """The additional fields of the message, its parts and its calls that have a value."""
        yield from keys_with_values(self.model_extra)
        for part in self._parts():
            yield from (f"content.{key}" for key in keys_with_values(part.model_extra))
        for call in self.tool_calls or []:
            for extra in (call.model_extra, call.function.model_extra):
                yield from (f"tool_calls.{key}" for key in keys_with_values(extra))

    def _parts(self) -> Sequence[TextPart | RefusalPart | ThinkingPart]:
        return self.content if isinstance(self.content, list) else []

    def _reasoning_text(self) -> str | None:
        thoughts = [part.thought for part in self._parts() if isinstance(part, ThinkingPart)]
        given = (self.reasoning_content, self.reasoning, "".join(thoughts) if thoughts else None)
        return next((text for text in given if isinstance(text, str)), None)


def keys_with_values(extra: Mapping[str, Any] | None) -> Iterator[str]:
    """The names of additional fields that have a value."""
    return (key for key, value in (extra or {}).items() if value not in (None, "", [], {}) and NAMED_KEY.fullmatch(key))


ChatMessage = Annotated[PromptMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class ChatCompletionRequest(SamplingFields, ChatCompatibilityFields):
    """The body of POST /v1/chat/completions."""

    model_config = example_bodies(
        messages=[{"role": "user", "content": "What is the capital of France?"}], max_tokens=32, temperature=0
    )
    content_fields = ("messages", "tools", "documents", "chat_template_kwargs")
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
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = Field(None, description="Limits the reasoning.")
    include_reasoning: bool | None = Field(None, description="false: omit `reasoning_content` from the answer.")
    chat_template: str | None = Field(None, description="Rejected: the server is started with a template.")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=MAX_DOCUMENTS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    _optional_variables: dict[str, Any] = PrivateAttr(default_factory=dict)
    _is_converted: bool = PrivateAttr(False)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], **optional_variables: Any) -> ChatCompletionRequest:
        """The request with these fields, converted from another API; raises RequestError if they are invalid.

        Args:
            fields: their `structured_outputs` are valid already.
            optional_variables: variables of the chat template that are set if it reads them.
        """
        try:
            chat = cls.model_validate({**fields, "structured_outputs": None})
        except ValidationError as error:
            message, field = validation_problem(cls, error.errors(), fields)
            raise RequestError(f"converted to a chat: {message}", field) from None
        chat.structured_outputs = fields.get("structured_outputs")
        chat._optional_variables = optional_variables
        chat._is_converted = True
        return chat

    def to_chat(self) -> ChatCompletionRequest:
        """The request itself, because other conversations are converted to this form."""
        return self

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them. One that was converted has one leading system message."""
        messages = [message.for_template() for message in self.messages]
        return with_one_leading_system(messages) if self._is_converted else messages

    def ignored_content(self) -> list[str]:
        answers = (message for message in self.messages if isinstance(message, AssistantMessage))
        keys = {f"messages.{key}" for answer in answers for key in answer.ignored_keys()}
        prompts = (message for message in self.messages if isinstance(message, PromptMessage))
        if any(message.role != "user" and any(map(BILLING_LINE.match, message.texts())) for message in prompts):
            keys.add("x-anthropic-billing-header")
        return sorted(keys)[:MAX_NAMED_KEYS]

    def output_limit(self) -> int | None:
        """The maximum number of output tokens; None if only the context limits it."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def chat_field_names(self) -> dict[str, str]:
        return {} if self.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}

    @property
    def effort_variables(self) -> dict[str, Any]:
        """The variables of the chat template that `reasoning_effort` sets, if the template reads them."""
        switch = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort, **switch}

    def template_variables(self, names: Collection[str]) -> dict[str, Any]:
        """The variables besides messages and tools for a chat template that reads the variables `names`: documents
        in any case, others if it reads them."""
        options = self.chat_template_kwargs or {}
        if reserved := set(RESERVED_VARIABLES) & options.keys():
            raise RequestError(
                f"chat_template_kwargs must not contain {', '.join(sorted(reserved))}: use the fields of the request",
                "chat_template_kwargs",
            )
        given = {} if self.documents is None else {"documents": self.documents}
        optional = self.effort_variables | self._optional_variables | options
        return {name: value for name, value in optional.items() if name in names} | given

    def unread_options(self, names: Collection[str]) -> list[str]:
        """The variables of `chat_template_kwargs` that a chat template which reads `names` does not read."""
        unread = sorted(name for name in self.chat_template_kwargs or {} if name not in names)
        named = (f".{name}" if NAMED_KEY.fullmatch(name) else "" for name in unread[:MAX_NAMED_KEYS])
        return [f"chat_template_kwargs{name}" for name in named]

    def num_logprobs(self) -> int | None:
        """The number of alternative tokens to return at each position; None to return no logprobs."""
        if self.top_logprobs and not self.logprobs:
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
