"""What completions and chat completions do alike: start generations, gather or stream them, count tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM, Generation
from chairlift.errors import ChairliftError, EngineDeadError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from chairlift.sampling_params import SamplingParams
from chairlift.server.protocol import ErrorBody, ErrorInfo, PromptTokensDetails, SamplingFields, Usage
from chairlift.server.responses import DONE, EventStream, unless_disconnected

Fields = TypeVar("Fields", bound=SamplingFields)

MAX_ANSWERS_PER_CALL = 2048


def token_text(token: bytes) -> str:
    """A token as text; where it is no whole character, its bytes as OpenAI writes them."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def to_event(body: BaseModel) -> bytes:
    """One server-sent event."""
    return b"data: " + body.model_dump_json().encode() + b"\n\n"


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    if isinstance(error, RequestError):
        info = ErrorInfo(message=str(error), type="invalid_request_error", param=error.param)
        return 400, ErrorBody(error=info)
    if isinstance(error, EngineDeadError):
        return 503, ErrorBody(error=ErrorInfo(message=str(error), type="service_unavailable_error"))
    message = str(error) if isinstance(error, ChairliftError) else "internal error"
    return 500, ErrorBody(error=ErrorInfo(message=message, type="internal_server_error"))


@dataclass(slots=True)
class Tally:
    """Tokens of one API call, over all its prompts. Deltas and whole answers add up to the same."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, output: RequestOutput) -> None:
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self.cached_tokens += output.num_cached_tokens
        if output.finished:
            self.prompt_tokens += len(output.prompt_token_ids)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )


@dataclass(slots=True)
class Call(Generic[Fields]):
    """One API call on its way."""

    body: Fields
    generations: list[Generation]
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    text_offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def abort(self) -> None:
        """Nobody waits for it any more, or it is done."""
        for generation in self.generations:
            generation.abort()

    def choice_index(self, generation_index: int, answer: CompletionOutput) -> int:
        """Answers to the first prompt come first."""
        return generation_index * (self.body.n or 1) + answer.index


class Serving(ABC, Generic[Fields]):
    """One endpoint that generates.

    Args:
        model_name: what the model is called in requests and answers.
    """

    id_prefix: str

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self.llm = llm
        self.model_name = model_name

    @abstractmethod
    def encoded(self, body: Fields) -> list[tuple[str | None, list[int]]]:
        """The prompts of a call: text and tokens."""

    @abstractmethod
    def params(self, body: Fields) -> SamplingParams:
        """Its sampling parameters."""

    @abstractmethod
    def response(self, call: Call[Fields], outputs: list[RequestOutput]) -> BaseModel:
        """The whole answer."""

    @abstractmethod
    def opening(self, call: Call[Fields]) -> list[BaseModel]:
        """Chunks before the first token."""

    @abstractmethod
    def chunk(self, call: Call[Fields], index: int, answer: CompletionOutput) -> BaseModel:
        """What is new in one answer to prompt `index`."""

    @abstractmethod
    def usage_chunk(self, call: Call[Fields], usage: Usage) -> BaseModel:
        """The last chunk, if usage was asked for."""

    async def handle(self, body: Fields, request: Request) -> Response:
        """Answer a call; raises RequestError before anything is sent."""
        params = self.params(body)
        # Tokenizing a long prompt takes a while, and releases the interpreter.
        prompts = await asyncio.to_thread(self.encoded, body)
        call = self._start(body, params, prompts)
        if body.stream:
            return EventStream(self._stream(call), on_close=call.abort)
        return await unless_disconnected(request, self._whole(call))

    def _start(self, body: Fields, params: SamplingParams, prompts: list[tuple[str | None, list[int]]]) -> Call[Fields]:
        if len(prompts) * params.n > MAX_ANSWERS_PER_CALL:
            raise RequestError(
                f"{len(prompts)} prompts x n={params.n} are more than {MAX_ANSWERS_PER_CALL} answers: send several "
                "calls",
                "n",
            )
        call_id = f"{self.id_prefix}-{body.request_id or uuid.uuid4().hex}"
        generations: list[Generation] = []
        try:
            for index, (text, token_ids) in enumerate(prompts):
                request_id = call_id if len(prompts) == 1 else f"{call_id}.{index}"
                generations.append(
                    self.llm.start(text, token_ids, params, request_id=request_id, priority=body.priority)
                )
        except BaseException:
            for generation in generations:
                generation.abort()
            raise
        return Call(body, generations, call_id, self.model_name)

    async def _whole(self, call: Call[Fields]) -> Response:
        try:
            outputs = await asyncio.gather(*(generation.collect() for generation in call.generations))
        finally:
            call.abort()
        content = self.response(call, list(outputs)).model_dump_json()
        return Response(content, media_type="application/json")

    async def _stream(self, call: Call[Fields]) -> AsyncIterator[bytes]:
        tally = Tally()
        try:
            for body in self.opening(call):
                yield to_event(body)
            async for index, output in _interleave(call.generations):
                tally.add(output)
                chunks = [to_event(self.chunk(call, index, answer)) for answer in output.outputs if _has_news(answer)]
                if chunks:
                    yield b"".join(chunks)
            if call.body.stream_options is not None and call.body.stream_options.include_usage:
                yield to_event(self.usage_chunk(call, tally.usage()))
            yield DONE
        except ChairliftError as error:
            yield to_event(error_body(error)[1])
            yield DONE


def _has_news(answer: CompletionOutput) -> bool:
    return bool(answer.text or answer.finish_reason is not None or answer.logprobs)


async def _interleave(generations: list[Generation]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Deltas of all generations as they come, with the generation's index."""
    waiting = {asyncio.ensure_future(anext(generation)): index for index, generation in enumerate(generations)}
    try:
        while waiting:
            done, _pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                output = future.result()
                index = waiting.pop(future)
                if not output.finished:
                    waiting[asyncio.ensure_future(anext(generations[index]))] = index
                yield index, output
    finally:
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def prompt_logprobs(llm: AsyncLLM, positions: list[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each position, token id -> logprob, rank and text; null for the first."""
    if positions is None:
        return None
    token_bytes = llm.engine.tokenizer.token_bytes
    return [
        None
        if position is None
        else {
            str(entry.token_id): {
                "logprob": entry.logprob,
                "rank": entry.rank,
                "decoded_token": token_text(token_bytes(entry.token_id)),
            }
            for entry in (*position.top, position.token)
        }
        for position in positions
    ]
