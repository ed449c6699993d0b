"""ChatEngine: the engine that answers in the terminal, with the numbers of each answer."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.counts import counted
from chairlift.errors import ConfigError

if TYPE_CHECKING:
    from chairlift.config import EngineConfig

Message = dict[str, Any]


@dataclass(slots=True)
class AnswerStats:
    """The numbers and times of an answer, in seconds of a monotonic clock.

    Attributes:
        num_cached_tokens: None before the first output.
    """

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0

    def record_text(self) -> None:
        """Record that new text has arrived."""
        self.last_token = time.monotonic()
        if self.first_token is None:
            self.first_token = self.last_token

    def text(self) -> str:
        """One line, such as "8 tokens, 92.1 tokens/s, first token after 0.12 s, 32 of 64 prompt tokens cached"."""
        parts = [f"{counted(self.num_output_tokens, 'token')}"]
        if self.first_token is not None and self.last_token is not None:
            if self.num_output_tokens > 1 and self.last_token > self.first_token:
                rate = (self.num_output_tokens - 1) / (self.last_token - self.first_token)
                parts.append(f"{rate:.1f} tokens/s")
            parts.append(f"first token after {self.first_token - self.started:.2f} s")
        if self.num_cached_tokens is not None:
            parts.append(f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens cached")
        return ", ".join(parts)


class ChatEngine:
    """Answers with an engine in this process. Raises ConfigError if the model has no chat template."""

    def __init__(self, config: EngineConfig) -> None:
        from chairlift.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM(config)
        self.name = self._llm.engine.facts.model_name
        if not self._llm.engine.tokenizer.has_chat_template:
            raise ConfigError(f"model {self.name!r} has no chat template: use `chairlift generate --no-chat`")

    async def stream(
        self, messages: list[Message], parameters: dict[str, Any], stats: AnswerStats
    ) -> AsyncIterator[str]:
        """Yield the text of an answer as it is generated, and fill `stats`. Raises ChairliftError if it fails.

        Args:
            parameters: the sampling parameters that are set.
        """
        defaults = self._llm.engine.facts.sampling_defaults
        params = defaults.params(**{"max_tokens": None, **parameters})
        async for output in self._llm.chat(messages, params):
            (answer,) = output.outputs
            stats.num_prompt_tokens = len(output.prompt_token_ids)
            stats.num_cached_tokens = (stats.num_cached_tokens or 0) + output.num_cached_tokens
            stats.num_output_tokens += len(answer.token_ids)
            if answer.text:
                stats.record_text()
                yield answer.text

    async def close(self) -> None:
        await self._llm.aclose()
