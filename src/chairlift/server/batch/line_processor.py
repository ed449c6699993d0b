"""Answers one line of a batch with the application of the server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any, Final

import httpx
import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import EngineDeadError, RequestError
from chairlift.server.api.routes import ENDPOINTS
from chairlift.server.batch.batch_lines import (
    BatchLineError,
    BatchRequestInput,
    BatchResponseData,
    DecodeError,
    answer_line,
    parse_request,
    read_custom_id,
)
from chairlift.server.http.error_responses import error_body

logger = logging.getLogger("chairlift")

API_PREFIX: Final = "/v1/"

RETRY_STATUSES: Final = (429, 503)
"""A call that is answered with one of these statuses is sent again."""

MAX_WAIT_SECONDS: Final = 5.0
JSON_HEADERS: Final = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line of the output with its status and token counts. `status` is None if the input was not a valid request."""

    line: bytes
    status: int | None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Usage(msgspec.Struct):
    """Token counts with the names of completions and chat, or with those of responses and messages."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _RequestBody(msgspec.Struct):
    stream: Any = None


class _ResponseBody(msgspec.Struct):
    id: str = ""
    usage: _Usage | None = None


class LineProcessor:
    """Answers lines of a batch, any number of them concurrently.

    Args:
        app: the application of the server for `llm`.
    """

    def __init__(self, llm: AsyncLLM, app: FastAPI) -> None:
        self._llm = llm
        self._client = client_of(app)
        self._urls = sorted(endpoint.path for endpoint in ENDPOINTS if endpoint.path.startswith(API_PREFIX))

    async def answer(self, number: int, line: bytes) -> AnsweredLine:
        """Return the result of line `number`.

        Raises:
            EngineDeadError: the engine died before it answered the line.
        """
        request = parse_request(line, number)
        if isinstance(request, BatchRequestInput) and request.url not in self._urls:
            request = BatchLineError(
                "invalid_url", f"url must be one of {', '.join(self._urls)}; got {request.url!r:.80}", number
            )
        if isinstance(request, BatchLineError):
            return AnsweredLine(answer_line(read_custom_id(line), error=request), None)
        response = _rejected_stream() if _is_stream(request) else await self._call(request)
        fields = _decode_response(response.content)
        request_id = response.headers.get("x-request-id") or fields.id
        body = BatchResponseData(response.status_code, request_id, msgspec.Raw(_one_line(response.content)))
        usage = fields.usage or _Usage()
        return AnsweredLine(
            answer_line(request.custom_id, body),
            response.status_code,
            usage.prompt_tokens + usage.input_tokens,
            usage.completion_tokens + usage.output_tokens,
        )

    async def _call(self, request: BatchRequestInput) -> httpx.Response:
        """The response of the API; the call is repeated while the server is overloaded."""
        while True:
            response = await self._client.post(request.url, content=bytes(request.body), headers=JSON_HEADERS)
            if response.status_code not in RETRY_STATUSES:
                return response
            if not self._llm.is_healthy:
                raise EngineDeadError(f"the engine died: {response.text[:500]}")
            await asyncio.sleep(_retry_after(response))


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """A client that calls an application without a socket."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception:  # Starlette sends a response with status 500 and then raises the error again.
            logger.exception("POST %s failed", scope["path"])

    transport = httpx.ASGITransport(logged)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)


def _is_stream(request: BatchRequestInput) -> bool:
    try:
        return msgspec.json.decode(request.body, type=_RequestBody).stream is True
    except DecodeError:
        return False  # The API reports the error.


def _rejected_stream() -> httpx.Response:
    message = "stream must not be true in a batch: leave it out"
    status, body = error_body(RequestError(message, "stream"))
    return httpx.Response(status, json=body.model_dump())


def _retry_after(response: httpx.Response) -> float:
    return min(MAX_WAIT_SECONDS, float(response.headers.get("retry-after", "1")))


def _decode_response(body: bytes) -> _ResponseBody:
    try:
        return msgspec.json.decode(body, type=_ResponseBody)
    except DecodeError:
        return _ResponseBody()


def _one_line(body: bytes) -> bytes:
    """The body as JSON on one line. A body that is not valid JSON becomes a JSON string."""
    if body.startswith(b"{") and b"\n" not in body:
        return body
    try:
        return msgspec.json.format(body, indent=-1)
    except DecodeError:
        return msgspec.json.encode(body.decode(errors="replace"))
