"""The request and response bodies of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingDefaults, SamplingParams
from chairlift.server.protocol.base import MAX_PROMPTS, Timings, UsageInfo, as_list, example_bodies, omitted_if_null
from chairlift.server.protocol.compatibility_fields import CompletionsCompatibilityFields
from chairlift.server.protocol.sampling import SamplingFields


class CompletionRequest(SamplingFields, CompletionsCompatibilityFields):
    """The body of POST /v1/completions."""

    model_config = example_bodies(prompt="The capital of France is", max_tokens=8, temperature=0)
    content_fields = ("prompt",)
    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = 16
    logprobs: int | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list; raises RequestError if it is empty."""
        if self.prompt == []:
            raise RequestError("prompt must not be an empty list: send at least one prompt", "prompt")
        return as_list(self.prompt)

    @property
    def is_echo_only(self) -> bool:
        """Whether only the prompt and its logprobs are returned."""
        return bool(self.echo) and self.max_tokens == 0

    def params(self, defaults: SamplingDefaults) -> SamplingParams:
        """The validated sampling parameters; see `sampling_params`."""
        n = 1 if self.n is None else self.n
        if self.best_of is not None and self.best_of > n:
            raise RequestError(
                f"best_of must be at most n={n}, got {self.best_of}: answers are not ranked, so "
                "leave best_of out, and give the number of answers as n",
                "best_of",
            )
        overrides: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is not None:  # null selects the default.
            overrides["max_tokens"] = 1 if self.is_echo_only else self.max_tokens
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            overrides["prompt_logprobs"] = self.logprobs
        return self.sampling_params(defaults, **overrides)


class CompletionLogprobs(BaseModel):
    """The logprobs of an answer. The entries of the first token of an echoed prompt are null."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionResponseChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = omitted_if_null()
    prompt_token_ids: list[int] | None = omitted_if_null()
    token_ids: list[int] | None = omitted_if_null()


class CompletionResponse(BaseModel):
    """A completion, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None
    timings: Timings | None = omitted_if_null()
