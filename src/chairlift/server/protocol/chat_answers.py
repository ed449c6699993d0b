"""POST /v1/chat/completions: what is answered. Chunks of a stream are written by hand (see `server/chunks.py`); their
models here are what the schema shows and what the tests hold the chunks against."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from chairlift.server.protocol.base import Sparse, Usage
from chairlift.server.protocol.timings import Timings
from chairlift.server.protocol.tools import AnsweredToolCall


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatLogprob]
    refusal: None = None


class AnswerMessage(Sparse):
    """Content is null where there are tool calls alone; `tool_calls` and `reasoning_content` are there if any are."""

    optional = frozenset({"tool_calls", "reasoning_content"})
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredToolCall] | None = None
    reasoning_content: str | None = None


class ChatChoice(Sparse):
    optional = frozenset({"token_ids"})
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Sparse):
    optional = frozenset({"prompt_logprobs", "prompt_token_ids", "timings"})
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    timings: Timings | None = None
