"""An OpenAI-compatible server as its client sees it: sends a call, notes when each part of the answer came."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import httpx

from chairlift.errors import ConfigError

PATHS: Final = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Endpoint type, as vLLM's benchmark names it, and its path."""

MAX_LINE_BYTES: Final = 16 << 20

DAMAGE: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading a body ends in that is not of OpenAI's form."""

KEEPALIVE_SECONDS: Final = 2.0
"""An idle connection is given up before any usual server gives it up (uvicorn: 5 s): a call on a connection that is
being closed would count as a failure of the server."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the server counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @classmethod
    def of(cls, body: dict[str, Any]) -> Usage:
        details = body.get("prompt_tokens_details") or {}
        counts = [int(body["prompt_tokens"]), int(body["completion_tokens"]), int(details.get("cached_tokens") or 0)]
        if min(counts) < 0:
            raise ValueError(f"usage holds a negative count: {counts}")
        return cls(*counts)


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a call gave no whole answer: `http 500`, `connect`, `connection lost`, `timeout`, `cut stream`, `bad chunk`,
    `error in stream`, `not a stream`, `empty answer`; and the words of the server or of the network."""

    kind: str
    message: str


@dataclass(slots=True)
class RequestRecord:
    """One request as it went. Times in seconds on the client's clock.

        due ------ sent ------ chunk_times[0] --- ... --- ended
         |-- lag ---|               |-- itls: gaps ---|     |
                    |---- ttft -----|                       |
                    |---- e2e_latency ----------------------|

    Attributes:
        input_len, output_len: tokens that were asked for.
        chunk_times: when each chunk with text came, or the last one, if none had text. A chunk may hold several tokens.
        ended: when the last chunk of the answer came; or when the failure showed.
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
    failure: RequestFailure | None = None

    @property
    def is_answered(self) -> bool:
        return self.failure is None

    @property
    def send_lag(self) -> float:
        """How late it was sent: the client's own fault, and no part of the latencies."""
        return self.sent - self.due

    @property
    def num_output_tokens(self) -> int:
        """By the server's count or, where it gives none, one a chunk."""
        return len(self.chunk_times) if self.usage is None else self.usage.completion_tokens

    @property
    def ttft(self) -> float | None:
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def itls(self) -> list[float]:
        """The gaps between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens, or if all came in one piece."""
        if not self.is_answered or self.num_output_tokens < 2 or len(self.chunk_times) < 2:
            return None
        return (self.ended - self.chunk_times[0]) / (self.num_output_tokens - 1)

    @property
    def e2e_latency(self) -> float | None:
        return self.ended - self.sent if self.is_answered else None


class StreamError(Exception):
    """A call that gives no whole answer, in the middle of reading it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.failure = RequestFailure(kind, message)


class EventLines:
    """Cuts a body into the payloads of its `data:` lines, which is all that OpenAI's streams are made of.

    Works on bytes: a JSON string may hold characters at which text is split into lines, and these are no ends of lines.
    """

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # of a line without its end yet
        self._num_rest = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now.

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
    """One pool of connections for all calls, without a limit of its own and without proxies.

    Args:
        timeout: seconds of silence after which a call has failed.

    Raises:
        ConfigError: base_url is not an http or https URL.
    """
    try:
        url = httpx.URL(base_url.rstrip("/").removesuffix("/v1"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"base_url {base_url!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"base_url must be like http://127.0.0.1:8000, got {base_url!r}")
    return httpx.AsyncClient(
        base_url=url,
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS),
        trust_env=False,
    )


class ApiClient:
    """Makes calls.

    Args:
        path: one of PATHS.
        now: the clock of the calls' times.
    """

    def __init__(self, http: httpx.AsyncClient, path: str, now: Callable[[], float]) -> None:
        self._http = http
        self._path = path
        self.now = now

    async def stream(self, body: dict[str, Any], call: RequestRecord) -> None:
        """Send `body`, read the whole answer and write into `call` what came when. What the server or the network does
        wrong ends in `call.failure`, never in an exception."""
        content = json.dumps(body).encode()
        call.sent = self.now()
        try:
            await self._stream(content, call)
        except StreamError as error:
            call.failure = error.failure
        except httpx.TimeoutException as error:
            call.failure = RequestFailure("timeout", _words(error))
        except httpx.ConnectError as error:
            call.failure = RequestFailure("connect", _words(error))
        except httpx.HTTPError as error:
            call.failure = RequestFailure("connection lost", _words(error))
        if call.failure is not None:
            call.ended = self.now()

    async def _stream(self, content: bytes, call: RequestRecord) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._http.stream("POST", self._path, content=content, headers=headers) as response:
            if response.status_code != 200:
                raise StreamError(f"http {response.status_code}", error_message(await response.aread()))
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise StreamError("not a stream", f"the answer is {kind or 'of no content type'}")
            is_done = await self._read(response, call)
        if not is_done and call.finish_reason is None:
            raise StreamError("cut stream", "the stream ended without a finish reason")
        if not call.chunk_times:
            raise StreamError("empty answer", "the stream held no choices")

    async def _read(self, response: httpx.Response, call: RequestRecord) -> bool:
        """Whether the stream said that it is done."""
        is_done, lines = False, EventLines()
        try:
            async for data in response.aiter_bytes():
                now = self.now()
                for payload in lines.feed(data):
                    if payload == b"[DONE]":
                        is_done = True
                    else:
                        record_chunk(payload, now, call)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError as error:
            raise StreamError("cut stream", _words(error)) from None
        return is_done


async def served_models(http: httpx.AsyncClient) -> list[str]:
    """What /v1/models lists.

    Raises:
        ConfigError: the server cannot be reached, or does not answer in OpenAI's form.
    """
    where = f"{http.base_url}".rstrip("/") + "/v1/models"
    try:
        response = await http.get("/v1/models")
    except httpx.HTTPError as error:
        raise ConfigError(f"no answer from {where}: {_words(error)}. Is the server running there?") from None
    if response.status_code != 200:
        raise ConfigError(f"{where} answered {response.status_code}: {error_message(response.content)}")
    try:
        return [str(card["id"]) for card in response.json()["data"]]
    except DAMAGE:
        raise ConfigError(f"{where} holds no list of models: {response.text[:200]!r}. Name one as `model`.") from None


def error_message(body: bytes) -> str:
    """The message of an error in OpenAI's form, or else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except DAMAGE:
        return body[:200].decode(errors="replace")


def record_chunk(payload: bytes, now: float, call: RequestRecord) -> None:
    """One chunk of an answer. A chunk that only opens the answer, or only counts its tokens, is no news."""
    try:
        chunk = json.loads(payload)
        if chunk.get("error") is not None:
            raise StreamError("error in stream", error_message(payload))
        if chunk.get("usage") is not None:
            call.usage = Usage.of(chunk["usage"])
        for choice in chunk.get("choices") or []:
            _take_choice(choice, now, call)
    except DAMAGE:
        raise StreamError("bad chunk", payload[:200].decode(errors="replace")) from None


def _take_choice(choice: dict[str, Any], now: float, call: RequestRecord) -> None:
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    call.finish_reason = choice.get("finish_reason") or call.finish_reason
    call.text += text
    if text or (call.finish_reason is not None and not call.chunk_times):
        call.chunk_times.append(now)
    call.ended = now


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
