"""Answers one line of a batch with the application of the server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Scope

from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import EngineDeadError, RequestError
from chairlift.server.api.endpoints import ENDPOINTS
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


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line of the output with its status and token counts. `status` is None if the input was not a valid request."""

    line: bytes
    status: int | None
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class AsgiResponse:
    """The response to one call. Header names are in lower case."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


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
        self._app = app
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
        fields = _decode_response(response.body)
        request_id = response.headers.get("x-request-id") or fields.id
        body = BatchResponseData(response.status, request_id, msgspec.Raw(_one_line(response.body)))
        usage = fields.usage or _Usage()
        return AnsweredLine(
            answer_line(request.custom_id, body),
            response.status,
            usage.prompt_tokens + usage.input_tokens,
            usage.completion_tokens + usage.output_tokens,
        )

    async def _call(self, request: BatchRequestInput) -> AsgiResponse:
        """The response of the API; the call is repeated while the server is overloaded."""
        while True:
            response = await post(self._app, request.url, bytes(request.body))
            if response.status not in RETRY_STATUSES:
                return response
            if not self._llm.is_healthy:
                raise EngineDeadError(f"the engine died: {response.body[:500].decode(errors='replace')}")
            await asyncio.sleep(_retry_after(response))


async def post(app: ASGIApp, path: str, body: bytes) -> AsgiResponse:
    """POST a JSON body and return the whole response. The application sees a cancellation as a disconnected client."""
    headers = [(b"host", b"batch"), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("batch", 80),
    }
    response = AsgiResponse()
    unread = [body]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode().lower(): value.decode("latin-1") for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            response.body += message.get("body", b"")

    try:
        await app(scope, receive, send)
    except Exception:
        if not response.status:
            raise
        # Starlette sends a response with status 500 and then raises the error again.
        logger.exception("POST %s failed with status %d", path, response.status)
    return response


def _is_stream(request: BatchRequestInput) -> bool:
    try:
        return msgspec.json.decode(request.body, type=_RequestBody).stream is True
    except DecodeError:
        return False  # The API reports the error.


def _rejected_stream() -> AsgiResponse:
    message = "stream must not be true in a batch: leave it out"
    status, body = error_body(RequestError(message, "stream"))
    return AsgiResponse(status, body=body.model_dump_json().encode())


def _retry_after(response: AsgiResponse) -> float:
    try:
        return min(MAX_WAIT_SECONDS, max(0.0, float(response.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0


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
