"""Runs a batch: sends many lines at once to the application of the server, and appends the results to the output."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from chairlift.config import EngineConfig
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.progress import progress_bar
from chairlift.errors import EngineDeadError, RequestError
from chairlift.server.access.access_options import AccessOptions, ServerLimits
from chairlift.server.api.routes import ENDPOINTS
from chairlift.server.application import create_app
from chairlift.server.batch.batch_files import (
    BatchIndex,
    BatchLineError,
    BatchOutput,
    BatchRequestInput,
    BatchResponseData,
    DecodeError,
    answer_line,
    parse_request,
    read_custom_id,
)
from chairlift.server.http.error_responses import error_info
from chairlift.server.http.streaming import run_to_end
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.protocol.base import ErrorBody
from chairlift.server.serve_options import ObservabilityOptions, ServeOptions

logger = logging.getLogger("chairlift")

NO_LIMITS: Final = ServerLimits(max_queued_requests=sys.maxsize, max_queued_tokens=sys.maxsize)
"""The calls in flight are limited by their number."""

CALLS_PER_SEQUENCE: Final = 2
"""Calls in flight per seat of the engine, so that a request is waiting whenever a seat becomes free."""


class _Usage(msgspec.Struct):
    """Token counts, named as in completions and chat, or as in responses and messages."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    """The fields of request and response bodies that are read here."""

    stream: Any = None
    id: str = ""
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class AnsweredLine:
    """A line of the output with its status and token counts. `status` is None if the input was not a valid request."""

    line: bytes
    status: int | None
    usage: _Usage = field(default_factory=_Usage)


class LineProcessor:
    """Answers lines of a batch, any number of them concurrently, by the application of the server."""

    def __init__(self, app: FastAPI) -> None:
        self._client = client_of(app)
        self._urls = sorted(endpoint.path for endpoint in ENDPOINTS if endpoint.path.startswith("/v1/"))

    async def answer(self, number: int, line: bytes) -> AnsweredLine:
        """Return the result of line `number`; raises EngineDeadError if the engine died before it answered the line."""
        request = parse_request(line, number)
        if isinstance(request, BatchRequestInput) and request.url not in self._urls:
            request = BatchLineError(
                "invalid_url", f"url must be one of {', '.join(self._urls)}; got {request.url!r:.80}", number
            )
        if isinstance(request, BatchLineError):
            return AnsweredLine(answer_line(read_custom_id(line), error=request), None)
        response = await self._call(request)
        fields = _decoded(response.content)
        body = BatchResponseData(response.status_code, fields.id, msgspec.Raw(_one_line(response.content)))
        return AnsweredLine(answer_line(request.custom_id, body), response.status_code, fields.usage or _Usage())

    async def _call(self, request: BatchRequestInput) -> httpx.Response:
        if _decoded(request.body).stream is True:
            status, info = error_info(RequestError("stream must not be true in a batch: leave it out", "stream"))
            return httpx.Response(status, json=ErrorBody(error=info).model_dump())
        headers = {"Content-Type": "application/json"}
        response = await self._client.post(request.url, content=bytes(request.body), headers=headers)
        if response.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise EngineDeadError(f"the engine died: {response.text[:500]}")
        return response


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """A client that calls an application without a socket."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception:  # Starlette sends a response with status 500 and then raises the error again.
            logger.exception("POST %s failed", scope["path"])

    transport = httpx.ASGITransport(logged)
    return httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None)


def _decoded(body: bytes | msgspec.Raw) -> _Body:
    """The known fields of a body; their defaults if it is invalid, which the API reports."""
    try:
        return msgspec.json.decode(body, type=_Body)
    except DecodeError:
        return _Body()


def _one_line(body: bytes) -> bytes:
    """The body as JSON on one line. A body that is not valid JSON becomes a JSON string."""
    try:
        return msgspec.json.format(body, indent=-1)
    except DecodeError:
        return msgspec.json.encode(body.decode(errors="replace"))


@dataclass(slots=True)
class BatchSummary:
    """The outcome of one run, counted in lines of the input.

    Attributes:
        previously_done: lines that already had a result in the output.
        remaining: lines without a result.
        completed: lines answered with status 200.
        failed: lines answered with another status or an error.
        prompt_tokens, completion_tokens: tokens of the lines answered in this run.
        seconds: the time from the first call to the last result, without loading the model.
    """

    previously_done: int
    remaining: int
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def add(self, answer: AnsweredLine) -> None:
        self.remaining -= 1
        if answer.status == HTTPStatus.OK:
            self.completed += 1
        else:
            self.failed += 1
        self.prompt_tokens += answer.usage.prompt_tokens + answer.usage.input_tokens
        self.completion_tokens += answer.usage.completion_tokens + answer.usage.output_tokens

    def text(self) -> str:
        """The summary as one line of text."""
        rate = f" ({self.completion_tokens / self.seconds:.0f} output tokens/s)" if self.seconds else ""
        return (
            f"{self.completed} completed, {self.failed} failed, {self.previously_done} done in earlier runs, "
            f"{self.remaining} remaining; "
            f"{self.prompt_tokens} prompt and {self.completion_tokens} output tokens in {self.seconds:.1f} s{rate}"
        )


def run_batch(
    config: EngineConfig,
    input_file: Path,
    output_file: Path,
    served_model_name: str | None = None,
    api: ApiOptions | None = None,
) -> BatchSummary:
    """Answer every line of `input_file` that has no result in `output_file`.

    SIGINT and SIGTERM end the run early; lines in flight then have no result, and the next run answers them.

    Raises:
        ConfigError: as `BatchIndex` and `BatchOutput`, before the model is loaded, or a result cannot be written.
        EngineDeadError: the engine died. The next run resumes the batch.
    """
    options = ServeOptions(
        served_model_name=served_model_name,
        limits=NO_LIMITS,
        access=AccessOptions(allow_unauthenticated=True),
        api=api or ApiOptions(),
        observability=ObservabilityOptions(access_log_format="none"),
    )
    index = BatchIndex(input_file)
    output = BatchOutput(output_file, index)
    if output.num_removed_bytes:
        logger.info("%s: removed an incomplete last line of %d bytes", output_file, output.num_removed_bytes)
    summary = BatchSummary(previously_done=output.num_answered, remaining=index.num_unanswered)
    with closing(output):
        if index.num_unanswered:
            asyncio.run(_run(AsyncLLM(config), index, output, summary, options))
    return summary


async def _run(
    llm: AsyncLLM, index: BatchIndex, output: BatchOutput, summary: BatchSummary, options: ServeOptions
) -> None:
    started = time.perf_counter()
    try:
        with progress_bar("answers", index.num_unanswered) as advance, cancelled_by_signals():

            def record(answer: AnsweredLine) -> None:
                summary.add(answer)
                advance()

            processor = LineProcessor(create_app(llm, options))
            num_calls = CALLS_PER_SEQUENCE * llm.engine.facts.scheduler_config.max_num_seqs
            with suppress(asyncio.CancelledError):
                await _answer_lines(processor, index.unanswered(), output, record, num_calls)
    finally:
        summary.seconds = time.perf_counter() - started
        llm.close()


async def _answer_lines(
    processor: LineProcessor,
    lines: Iterator[tuple[int, bytes]],
    output: BatchOutput,
    on_written: Callable[[AnsweredLine], None],
    num_calls: int,
) -> None:
    """Answer all lines in `num_calls` concurrent calls, and write their results. If cancelled, write the results that
    exist. Those that arrive during a write are one append."""
    ready: list[AnsweredLine] = []
    thread = ThreadPoolExecutor(1, "batch-output")

    def append() -> None:
        answers = ready.copy()
        if answers:
            output.append([answer.line for answer in answers])
            del ready[: len(answers)]
            for answer in answers:
                on_written(answer)

    async def call() -> None:
        for number, line in lines:  # An iterator that all calls share.
            ready.append(await processor.answer(number, line))
            await run_to_end(thread.submit(append))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(num_calls):
                group.create_task(call())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await run_to_end(thread.submit(append))
        thread.shutdown()


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Cancel the current task at SIGINT or SIGTERM. A second signal has its default effect."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    signals = (signal.SIGINT, signal.SIGTERM)
    assert task is not None

    def restore() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def cancel() -> None:
        restore()
        task.cancel()

    for number in signals:
        loop.add_signal_handler(number, cancel)
    try:
        yield
    finally:
        restore()
