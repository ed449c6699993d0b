"""POST /v1/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from chairlift.errors import RequestError
from chairlift.server.protocol.base import Usage
from chairlift.server.protocol.sampling import SamplingFields


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
