"""From a line of a batch to its answer, by the server's own application."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from fastapi import FastAPI

from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import EngineDeadError, RequestError
from chairlift.server.batch.asgi_client import AsgiResponse, post
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

API_PREFIX: Final = "/v1/"

RETRY_STATUSES: Final = (429, 503)
"""Statuses that refuse a call for now."""

MAX_WAIT_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line of the output, and what it says. `status` is None where the line was no request."""

    line: bytes
    status: int | None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Usage(msgspec.Struct):
    """As completions and chat count tokens, or as responses and messages do."""

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
    """Answers lines over one engine; any number at once.

    Args:
        app: the server's application over `llm`.
    """

    def __init__(self, llm: AsyncLLM, app: FastAPI) -> None:
        self._llm = llm
        self._app = app
        self._urls = sorted(_generating_urls(app))

    async def answer(self, number: int, line: bytes) -> AnsweredLine:
        """The answer to line `number`.

        Raises:
            EngineDeadError: the engine is gone, so there is none.
        """
        request = parse_request(line, number)
        if isinstance(request, BatchRequestInput) and request.url not in self._urls:
            request = BatchLineError(
                "invalid_url", f"url {request.url!r:.80} is none of {', '.join(self._urls)}", number
            )
        if isinstance(request, BatchLineError):
            return AnsweredLine(answer_line(read_custom_id(line), error=request), None)
        response = _refused_stream() if _asks_for_stream(request) else await self._call(request)
        said = _read(response.body)
        request_id = response.headers.get("x-request-id") or said.id
        body = BatchResponseData(response.status, request_id, msgspec.Raw(_one_line(response.body)))
        usage = said.usage or _Usage()
        return AnsweredLine(
            answer_line(request.custom_id, body),
            response.status,
            usage.prompt_tokens + usage.input_tokens,
            usage.completion_tokens + usage.output_tokens,
        )

    async def _call(self, request: BatchRequestInput) -> AsgiResponse:
        """The API's answer, however often it says that there is no room yet."""
        while True:
            response = await post(self._app, request.url, bytes(request.body))
            if response.status not in RETRY_STATUSES:
                return response
            if not self._llm.is_healthy:
                raise EngineDeadError(f"the engine broke down: {response.body[:500].decode(errors='replace')}")
            await asyncio.sleep(_retry_after(response))


def _generating_urls(app: FastAPI) -> Iterator[str]:
    """Where generation is asked for: what takes a POST and has no parameters."""
    for path, operations in app.openapi()["paths"].items():
        if "post" in operations and path.startswith(API_PREFIX) and "{" not in path:
            yield path


def _asks_for_stream(request: BatchRequestInput) -> bool:
    try:
        return msgspec.json.decode(request.body, type=_RequestBody).stream is True
    except DecodeError:
        return False  # what is wrong with the body, the API says


def _refused_stream() -> AsgiResponse:
    problem = "stream: true has no effect in a batch, whose answers are whole: leave it out"
    status, body = error_body(RequestError(problem, "stream"))
    return AsgiResponse(status, body=body.model_dump_json().encode())


def _retry_after(response: AsgiResponse) -> float:
    try:
        return min(MAX_WAIT_SECONDS, max(0.0, float(response.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0


def _read(body: bytes) -> _ResponseBody:
    try:
        return msgspec.json.decode(body, type=_ResponseBody)
    except DecodeError:
        return _ResponseBody()


def _one_line(body: bytes) -> bytes:
    """JSON without line ends; a body that is none becomes a string."""
    if body.startswith(b"{") and b"\n" not in body:
        return body
    try:
        return msgspec.json.format(body, indent=-1)
    except DecodeError:
        return msgspec.json.encode(body.decode(errors="replace"))
