"""Sources of answers for the terminal: an engine in this process, or a server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from chairlift.counts import counted
from chairlift.errors import ChairliftError, ConfigError

if TYPE_CHECKING:
    from chairlift.config import EngineConfig

Message = dict[str, Any]

CONNECT_SECONDS = 10.0


class AnswerError(ChairliftError):
    """An answer failed; the conversation can go on."""


@dataclass(slots=True)
class AnswerStats:
    """The numbers and times of an answer, in seconds of a monotonic clock.

    Attributes:
        num_cached_tokens: None if the source does not report it.
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


class EngineBackend:
    """Answers with an engine in this process."""

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
            parameters: the sampling parameters that are set, with the names of OpenAI's API.
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


class ServerBackend:
    """Answers with a server that has OpenAI's API.

    Args:
        url: the URL of the server, with or without /v1.
        model: the name of the model; None selects the first one that the server lists.

    Raises:
        ConfigError: the URL is invalid, the server cannot be reached, or it rejects the key.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        import httpx

        from chairlift.observability.http_client import client_settings, error_message

        settings = client_settings(url, api_key)
        try:
            with httpx.Client(**settings, timeout=CONNECT_SECONDS) as client:
                listed = client.get("/v1/models")
        except httpx.HTTPError as error:
            raise ConfigError(f"url={url}: no answer ({error}): is the server running?") from None
        if listed.status_code != 200:
            raise ConfigError(f"url={url}: {error_message(listed)}")
        self.name: str = model or _first_model(url, listed.content)
        self._client = httpx.AsyncClient(**settings, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))

    async def stream(
        self, messages: list[Message], parameters: dict[str, Any], stats: AnswerStats
    ) -> AsyncIterator[str]:
        import httpx

        from chairlift.observability.http_client import error_message

        body = {"model": self.name, "messages": messages, "stream": True, **parameters}
        body["stream_options"] = {"include_usage": True}
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise AnswerError(error_message(response))
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        for text in _chunk_text(json.loads(line[6:]), stats):
                            yield text
        except httpx.HTTPError as error:
            raise AnswerError(f"the connection to the server failed: {error or type(error).__name__}") from None

    async def close(self) -> None:
        await self._client.aclose()


ChatBackend = EngineBackend | ServerBackend


def _chunk_text(chunk: dict[str, Any], stats: AnswerStats) -> list[str]:
    """The new text of a chunk of a stream."""
    if "error" in chunk:
        raise AnswerError(chunk["error"]["message"])
    if usage := chunk.get("usage"):
        stats.num_prompt_tokens, stats.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        stats.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    texts = [text for choice in chunk.get("choices", ()) if (text := choice["delta"].get("content"))]
    if texts:
        stats.record_text()
    return texts


def _first_model(url: str, body: bytes) -> str:
    """The first model of the response of /v1/models. Raises ConfigError if it has none."""
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ConfigError(f"url={url}: /v1/models lists no model: is this the URL of an OpenAI API?") from None
