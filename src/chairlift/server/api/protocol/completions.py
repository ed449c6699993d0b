"""POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from chairlift.errors import RequestError
from chairlift.sampling_params import MAX_N, SamplingParams
from chairlift.server.api.protocol.base import SparseResponse, Timings, UsageInfo
from chairlift.server.api.protocol.compatibility_fields import CompletionsCompatibilityFields
from chairlift.server.api.protocol.item_limits import MAX_PROMPTS
from chairlift.server.api.protocol.sampling import SamplingFields


class CompletionRequest(SamplingFields, CompletionsCompatibilityFields):
    """POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=MAX_PROMPTS)]
    )
    max_tokens: int | None = 16
    logprobs: int | None = None
    best_of: int | None = Field(None, description="Make so many answers, give the n likeliest by mean logprob.")

    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt; raises RequestError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt is an empty list: give at least one prompt", "prompt")
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt

    @property
    def is_echo_only(self) -> bool:
        """The prompt comes back with its logprobs, and nothing is generated."""
        return bool(self.echo) and self.max_tokens == 0

    def num_choices(self) -> int:
        return super().num_choices() if self.best_of is None else self.best_of

    def params(self) -> SamplingParams:
        """Validated parameters; raises RequestError naming the field."""
        more: dict[str, Any] = {"logprobs": self.logprobs}
        if self.max_tokens is not None:  # null is the default, as with other fields.
            more["max_tokens"] = 1 if self.is_echo_only else self.max_tokens
        if self.best_of is not None:
            self._check_best_of(self.best_of)
            more |= {"n": self.best_of, "logprobs": self.logprobs or 0}
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            more["prompt_logprobs"] = self.logprobs
        return self.sampling_params(**more)

    def _check_best_of(self, best_of: int) -> None:
        if not super().num_choices() <= best_of <= MAX_N:
            raise RequestError(
                f"best_of must be at least n={super().num_choices()} and at most {MAX_N}, got {best_of}", "best_of"
            )
        if self.stream and best_of > super().num_choices():
            raise RequestError("best_of cannot be streamed: which answer is best is known at the end", "best_of")


class CompletionLogprobs(BaseModel):
    """`None` stands for the first token of an echoed prompt, which follows nothing."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionResponseChoice(SparseResponse):
    optional = frozenset({"prompt_logprobs", "prompt_token_ids", "token_ids"})
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(SparseResponse):
    """A completion; as a stream, one chunk of it."""

    optional = frozenset({"timings"})
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None
    timings: Timings | None = None
