"""The OpenAI API's bodies, as far as they are honoured. An unknown field or value is refused, never ignored.

Field names are OpenAI's; below the line in each request they are vLLM's, for what OpenAI does not have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams


class Body(BaseModel):
    """Strict: a number in a string is a string."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool = False


PASSED_ON = (
    "temperature",
    "top_p",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "logit_bias",
    "seed",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)
"""Fields that are sampling parameters of the same name; null is the parameter's default."""


class SamplingFields(Body):
    """What completions and chat completions have in common."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    # -- accepted, because what is done satisfies the value --
    user: str | None = Field(None, description="Says who asks; nothing here depends on it.")
    metadata: dict[str, str] | None = Field(None, description="Tags for the caller's own use; nothing is stored.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one tier.")
    # -- vLLM's --
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    priority: int = 0
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None

    def sampling_params(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Validated parameters; raises RequestError naming the field."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")
        given: dict[str, Any] = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    # -- accepted, because what is done satisfies the value --
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt; raises RequestError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list: give at least one prompt", "prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


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


# -- responses -----------------------------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    text_offset: list[int] = []
    token_logprobs: list[float] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float]] = []


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(BaseModel):
    """A completion; as a stream, one chunk of it."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


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


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok", "dead"]


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """What every refusal looks like."""

    error: ErrorInfo
