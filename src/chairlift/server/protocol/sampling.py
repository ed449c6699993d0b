"""The fields that completions and chats have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from chairlift.errors import RequestError
from chairlift.sampling_params import SamplingParams
from chairlift.server.protocol.base import Body


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
