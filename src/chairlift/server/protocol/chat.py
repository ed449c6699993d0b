"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from chairlift.errors import RequestError
from chairlift.server.protocol.base import Body, Usage
from chairlift.server.protocol.sampling import SamplingFields


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    # -- null where an answer is sent back as it came --
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: plain text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class TextFormat(Body):
    type: Literal["text"]


class ChatCompletionRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | None = None
    # -- accepted, because what is done satisfies the value: there are no tools --
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    # -- vLLM's --
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    def limit(self) -> int | None:
        """Output tokens at most; None is what fits."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} disagree: "
                "give one of them",
                "max_completion_tokens",
            )
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_options(self) -> dict[str, Any]:
        """What the chat template gets besides the messages."""
        options = self.chat_template_kwargs or {}
        if taken := {"messages", "self", "add_generation_prompt"} & options.keys():
            raise RequestError(
                f"chat_template_kwargs must not hold {', '.join(sorted(taken))}: a field of its own says it",
                "chat_template_kwargs",
            )
        return {**options, "add_generation_prompt": self.add_generation_prompt}

    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell; None tells nothing."""
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
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


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Delta(BaseModel):
    """Holds only what is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer(mode="wrap")
    def _sparse(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}


class ChatChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
