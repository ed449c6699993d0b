"""An HTTP client that sends requests to an OpenAI-compatible server and records the arrival of each chunk."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from chairlift.errors import ConfigError

PATHS: Final = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""The path of each backend, under the names of vLLM's benchmark."""

MAX_LINE_BYTES: Final = 16 << 20

MALFORMED_BODY_ERRORS: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions raised while reading a body that has not the form of OpenAI's API."""

KEEPALIVE_SECONDS: Final = 2.0
"""An idle connection is closed earlier than servers close it (uvicorn: 5 s): a request on a connection that the server
is closing would count as a failure of the server."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The token counts that the server reported."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @classmethod
    def from_body(cls, body: dict[str, Any]) -> Usage:
        """Read the field `usage` of a chunk."""
        details = body.get("prompt_tokens_details") or {}
        counts = [int(body["prompt_tokens"]), int(body["completion_tokens"]), int(details.get("cached_tokens") or 0)]
        if min(counts) < 0:
            raise ValueError(f"usage has a negative count: {counts}")
        return cls(*counts)


@dataclass(frozen=True, slots=True)
class HttpFailure:
    """The reason why a request has no complete answer.

    Attributes:
        kind: `http 500`, `connect`, `connection lost`, `timeout`, `cut stream`, `bad chunk`, `error in stream`,
            `not a stream` or `empty answer`.
        message: the message of the server or of the network.
    """

    kind: str
    message: str


@dataclass(slots=True)
class RequestRecord:
    """The times and the answer of one request, in seconds on the clock of the client.

        due ------ sent ------ chunk_times[0] --- ... --- ended
         |-- lag ---|               |-- itls: gaps ---|     |
                    |---- ttft -----|                       |
                    |---- e2e_latency ----------------------|

    Attributes:
        input_len: tokens of the prompt.
        output_len: requested output tokens.
        due: time at which the request was due.
        sent: time at which it was sent.
        chunk_times: arrival of each chunk with text, or of the last chunk if none has text. A chunk may have several
            tokens.
        ended: arrival of the last chunk, or the time of the failure.
    """

    request_id: str
    input_len: int
    output_len: int
    due: float
    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    failure: HttpFailure | None = None

    @property
    def is_answered(self) -> bool:
        return self.failure is None

    @property
    def send_lag(self) -> float:
        """The delay of the client. It is not part of the latencies."""
        return self.sent - self.due

    @property
    def num_output_tokens(self) -> int:
        """The number that the server reported, or else the number of chunks."""
        return len(self.chunk_times) if self.usage is None else self.usage.completion_tokens

    @property
    def ttft(self) -> float | None:
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def itls(self) -> list[float]:
        """The times between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None if there are fewer than two tokens or chunks."""
        if not self.is_answered or self.num_output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.ended - self.chunk_times[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_latency(self) -> float | None:
        return self.ended - self.sent if self.is_answered else None


class StreamError(Exception):
    """Raised if a response is not a complete answer."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = HttpFailure(kind, message)


class EventLines:
    """Splits a stream of server-sent events into the payloads of its `data:` lines.

    Works on bytes, because a JSON string may contain characters at which `str.splitlines` would split.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # the beginning of an incomplete line
        self._num_rest = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add data and return the payloads that are complete.

        Raises:
            StreamError: a line is longer than MAX_LINE_BYTES.
        """
        if b"\n" not in data:
            self._keep(data)
            return []
        *lines, rest = (b"".join(self._rest) + data).split(b"\n")
        self._rest, self._num_rest = [], 0
        self._keep(rest)
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def _keep(self, part: bytes) -> None:
        self._num_rest += len(part)
        if self._num_rest > MAX_LINE_BYTES:
            raise StreamError("bad chunk", f"a line of the stream is longer than {MAX_LINE_BYTES} bytes")
        self._rest.append(part)


def open_client(base_url: str, api_key: str | None, timeout: float) -> httpx.AsyncClient:
    """Create a client with unlimited connections and without proxies.

    Args:
        timeout: seconds without data after which a request fails.

    Raises:
        ConfigError: base_url is not an http or https URL.
    """
    try:
        url = httpx.URL(base_url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"base_url {base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url must have the form http://127.0.0.1:8000, got {base_url!r}")
    return httpx.AsyncClient(
        base_url=url,
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
        trust_env=False,
    )


class ApiClient:
    """Sends requests to one endpoint and records them.

    Args:
        path: a path of PATHS.
        now: the clock of the records.
    """

    def __init__(self, http: httpx.AsyncClient, path: str, now: Callable[[], float]) -> None:
        self._http = http
        self._path = path
        self.now = now

    async def stream(self, body: dict[str, Any], record: RequestRecord) -> None:
        """Send the body and record the answer. Errors of the server or of the network set `record.failure`."""
        content = json.dumps(body).encode()
        record.sent = self.now()
        try:
            await self._stream(content, record)
        except StreamError as error:
            record.failure = error.failure
        except httpx.TimeoutException as error:
            record.failure = HttpFailure("timeout", _error_text(error))
        except httpx.ConnectError as error:
            record.failure = HttpFailure("connect", _error_text(error))
        except httpx.HTTPError as error:
            record.failure = HttpFailure("connection lost", _error_text(error))
        if record.failure is not None:
            record.ended = self.now()

    async def _stream(self, content: bytes, record: RequestRecord) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", self._path, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise StreamError(f"http {response.status_code}", error_message(await response.aread()))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise StreamError("not a stream", f"the content type must be text/event-stream, got {kind or 'none'}")
            is_done = await self._read(response, record)
        if not is_done and record.finish_reason is None:
            raise StreamError("cut stream", "the stream ended without a finish reason")
        if not record.chunk_times:
            raise StreamError("empty answer", "the stream had no choices")

    async def _read(self, response: httpx.Response, record: RequestRecord) -> bool:
        """Read the stream; returns whether it ended with [DONE]."""
        is_done, lines = False, EventLines()
        try:
            async for data in response.aiter_bytes():
                now = self.now()
                for payload in lines.feed(data):
                    if payload == b"[DONE]":
                        is_done = True
                    else:
                        record_chunk(payload, now, record)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise StreamError("cut stream", _error_text(error)) from None
        return is_done


async def served_models(http: httpx.AsyncClient) -> list[str]:
    """Read the names of the models that /v1/models lists.

    Raises:
        ConfigError: the server does not answer, or its answer has not the form of OpenAI's API.
    """
    where = f"{http.base_url}".rstrip("/") + "/v1/models"
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError(f"no answer from {where}: {_error_text(error)}. Is the server running?") from None
    if response.status_code != 200:
        raise ConfigError(f"{where} answered {response.status_code}: {error_message(response.content)}")
    try:
        return [str(card["id"]) for card in response.json()["data"]]
    except MALFORMED_BODY_ERRORS:
        raise ConfigError(
            f"{where} returned no list of models: {response.text[:200]!r}. Give the name of the model with --model."
        ) from None


def error_message(body: bytes) -> str:
    """The message of an error in the form of OpenAI's API, or else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except MALFORMED_BODY_ERRORS:
        return body[:200].decode(errors="replace")


def record_chunk(payload: bytes, now: float, record: RequestRecord) -> None:
    """Record one chunk of an answer. A chunk without text, such as the first one of a chat or the usage, has no time.

    Raises:
        StreamError: the chunk is an error or has the wrong form.
    """
    try:
        chunk = json.loads(payload)
        if chunk.get("error") is not None:
            raise StreamError("error in stream", error_message(payload))
        if chunk.get("usage") is not None:
            record.usage = Usage.from_body(chunk["usage"])
        for choice in chunk.get("choices") or []:
            _record_choice(choice, now, record)
    except MALFORMED_BODY_ERRORS:
        raise StreamError("bad chunk", payload[:200].decode(errors="replace")) from None


def _record_choice(choice: dict[str, Any], now: float, record: RequestRecord) -> None:
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    record.finish_reason = choice.get("finish_reason") or record.finish_reason
    record.text += text
    if text or (record.finish_reason is not None and not record.chunk_times):
        record.chunk_times.append(now)
    record.ended = now


def _error_text(error: Exception) -> str:
    return str(error) or type(error).__name__
