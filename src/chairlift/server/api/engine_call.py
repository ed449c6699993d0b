"""The base classes of calls that send requests to the engine: admission, generation, whole and streamed responses."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Generic, Self, TypeVar

from msgspec import UNSET
from pydantic import BaseModel
from starlette.responses import Response

from chairlift.counts import counted
from chairlift.engine.async_llm import Generation
from chairlift.errors import ChairliftError, DeadlineError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput, RequestTimes
from chairlift.sampling_params import SamplingParams
from chairlift.server.api.endpoint import CallContext
from chairlift.server.api.logprobs import LogprobWriter
from chairlift.server.http.error_responses import error_info
from chairlift.server.http.streaming import COMMENT, EventStream
from chairlift.server.preparation.request_plan import (
    RequestPlan,
    attribute_errors_to,
    check_logprobs,
    rename_fields_in_errors,
)
from chairlift.server.protocol.base import ErrorBody, ErrorInfo, PromptTokensDetails, Timings, UsageInfo
from chairlift.server.protocol.chunks import DONE, Chunk, ChunkChoice, encode, to_chunk
from chairlift.server.protocol.sampling import CallFields, EngineFields, SamplingFields

MAX_ANSWERS_PER_CALL: Final = 2048
"""The maximum number of prompts times answers of one call."""

ENTRIES_PER_POSITION: Final = 20
"""Logprob entries that `output_size` assumes for one position."""

BYTES_PER_TOKEN: Final = 16
"""Bytes of a vector that take as long to write as a token of text."""

IGNORED_HEADER: Final = "x-chairlift-ignored"
"""The header of a response that names the fields of the request without an effect."""

MAX_IGNORED: Final = 24
"""The maximum number of names in that header."""

MAX_IGNORED_CHARACTERS: Final = 160
"""The maximum length of a name in that header. Some proxies accept only 4 KiB of headers in all."""

LARGE_OUTPUT: Final = 1024
"""An output of more tokens and logprob entries than this is written on a thread."""

PROMPTS_PER_ITERATION: Final = 32
"""Prompts of one call that are started before the event loop can serve other calls."""

CallBody = TypeVar("CallBody", bound=CallFields)
Fields = TypeVar("Fields", bound=EngineFields)
ChunkFields = TypeVar("ChunkFields", bound=SamplingFields)
Plans = TypeVar("Plans", bound=RequestPlan)


@dataclass(slots=True)
class CallUsage:
    """The token counts and times of one API call, over all of its prompts and answers.

    Attributes:
        num_choices: the number of finished answers.
        times: the times of the answer that finished last.
        finish_reason: the reason of the answer that finished first.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_choices: int = 0
    times: RequestTimes | None = None
    finish_reason: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Add an output: a complete answer, or a delta of one."""
        for answer in output.outputs:
            self.completion_tokens += len(answer.token_ids)
            self.num_choices += answer.finish_reason is not None
            self.finish_reason = self.finish_reason or answer.finish_reason
        self.cached_tokens += output.num_cached_tokens
        self.times = output.times or self.times

    def usage(self) -> UsageInfo:
        """The token counts in the form of OpenAI."""
        return UsageInfo(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self.cached_tokens),
        )

    def timings(self) -> Timings | None:
        """The times in seconds, or None if no token was computed."""
        times = self.times
        if times is None or times.first_scheduled is None or times.first_token is None or times.finished is None:
            return None
        prefill = times.first_token - times.first_scheduled
        decode = times.finished - times.first_token
        return Timings(
            queue=times.first_scheduled - times.arrival,
            prefill=prefill,
            decode=decode,
            prompt_tokens_per_second=_rate(self.prompt_tokens - self.cached_tokens, prefill),
            output_tokens_per_second=_rate(self.completion_tokens - self.num_choices, decode),
        )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def timing_headers(timings: Timings | None) -> dict[str, str]:
    """The header `Server-Timing` with the times in milliseconds (W3C Server Timing)."""
    if timings is None:
        return {}
    spans = {"queue": timings.queue, "prefill": timings.prefill, "decode": timings.decode}
    return {"Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items())}


class EngineCall(ABC, Generic[CallBody, Plans]):
    """One call of an endpoint that uses the engine, from its admission to its end.

    Raises:
        RequestError, OverloadedError: the call is not admitted.
    """

    def __init__(self, context: CallContext, body: CallBody, plan: Plans) -> None:
        service, record = context.lease.service, context.call
        self.body, self.plan = body, plan
        self.llm, self._service = service.llm, service
        self._check_size()
        token_ids = [ids for _, ids in plan.prompts]
        self.permit = context.admission.admit(
            record.key,
            token_ids,
            timeout=_remaining_seconds(body.timeout, record.model_seconds),
            cache_salt=body.cache_salt,
            slot=record.slot,
        )
        request_id = body.request_id or record.request_id or uuid.uuid4().hex
        self.id = record.id = f"{context.endpoint.id_prefix}{request_id}"
        self.lora_name = context.lease.model.adapter_of(body.model)
        self.model = self.lora_name or service.name
        self.created = int(time.time())
        self.usage = CallUsage(sum(map(len, token_ids)))
        self.generations: list[Generation] = []
        self.record = record
        self._lease = context.lease.renew()

    @classmethod
    async def start(cls, context: CallContext, body: CallBody, plan: Plans) -> Self:
        """Admit a call, and send its requests to the engine. The caller must close it."""
        call = cls(context, body, plan)
        try:
            for index, prompt in enumerate(plan.prompts):
                request_id = call.id if len(plan.prompts) == 1 else f"{call.id}.{index}"
                call.generations.append(call._generate(prompt, request_id))
                if index % PROMPTS_PER_ITERATION == PROMPTS_PER_ITERATION - 1:
                    await asyncio.sleep(0)
        except BaseException:
            call.close()
            raise
        call.permit.call_after_deadline(call._fail_after_deadline)
        return call

    def _check_size(self) -> None:
        num_prompts, n = len(self.plan.prompts), self.plan.params.n
        if num_prompts * n > MAX_ANSWERS_PER_CALL:
            raise RequestError(
                f"{counted(num_prompts, 'prompt')} with n={n} would produce {num_prompts * n} answers, but at "
                f"most {MAX_ANSWERS_PER_CALL} are allowed per call: split the prompts into several calls",
                "n",
            )
        check_logprobs(self.plan, self.llm.engine.input_processor.limits)

    def _generate(self, prompt: tuple[str | None, list[int]], request_id: str) -> Generation:
        text, token_ids = prompt
        return self.llm.start(
            text,
            token_ids,
            self._params(len(token_ids)),
            request_id=request_id,
            priority=0 if "priority" in self.plan.ignored else self.body.priority or 0,
            tenant=self.permit.tenant,
            cache_salt=self.permit.cache_salt,
            deadline=self.permit.deadline,
            lora_name=self.lora_name,
            on_output=self.permit.track_prompt(len(token_ids)).record_output,
        )

    def _params(self, num_prompt_tokens: int) -> SamplingParams:
        return self.plan.params_for(num_prompt_tokens, self.llm.engine.input_processor.limits)

    def close(self) -> None:
        """Abort the generations that still run, and close the permit."""
        for generation in self.generations:
            generation.abort()
        self.permit.close()
        self._lease.close()

    def _fail_after_deadline(self) -> None:
        """End all generations with an error, because the deadline has passed and the engine does not respond."""
        for generation in self.generations:
            generation.fail(
                DeadlineError(f"the timeout of {self.body.timeout:g} s has passed and the engine does not respond")
            )

    def add(self, output: RequestOutput) -> None:
        """Count an output: a complete answer, or a delta of one."""
        self.usage.add(output)
        self.record.finish_reason = self.usage.finish_reason

    async def collect(self) -> list[RequestOutput]:
        """Wait for the complete outputs of all prompts, and close the call."""
        try:
            outputs = await asyncio.gather(*(generation.collect() for generation in self.generations))
        finally:
            self.close()
        for output in outputs:
            self.add(output)
        return outputs

    async def write(self, size: int, function: Callable[..., bytes], *arguments: object) -> bytes:
        """Call a function that writes output of this size: on a thread if it would block the event loop."""
        if size <= LARGE_OUTPUT:
            return function(*arguments)
        return await self._service.run(function, *arguments)

    @abstractmethod
    def response(self, outputs: list[RequestOutput]) -> BaseModel:
        """The body of a response that is not streamed."""

    @classmethod
    async def serve(cls, context: CallContext, body: CallBody, plan: Plans) -> Response:
        """Answer a call; see `Endpoint.serve`."""
        with sent_fields_in_errors(body, plan):
            unfollowed: tuple[str, ...] = ()
            if plan.params.structured_outputs is not None:
                constraints = context.lease.service.llm.engine.input_processor.constraints
                unfollowed = await constraints.compile_in_background(plan.params)
            call = await cls.start(context, body, plan)
        context.call.ignored = ignored = ignored_fields(body, plan, unfollowed)
        response = await call.respond()
        if ignored:
            response.headers[IGNORED_HEADER] = ", ".join(ignored)
        return response

    async def respond(self) -> Response:
        """Wait for the complete outputs, and return the whole response."""
        with sent_fields_in_errors(self.body, self.plan):
            outputs = await self.collect()
        size = sum(map(output_size, outputs))
        content = await self.write(size, lambda: encode(self.response(outputs)))
        return Response(content, media_type="application/json")


class GeneratingCall(EngineCall[Fields, Plans]):
    """The base class of calls that generate.

    Attributes:
        ping: what a silent stream of the endpoint sends.
    """

    ping: ClassVar[bytes] = COMMENT

    @abstractmethod
    def writer(self) -> StreamWriter:
        """The writer of a response that is streamed."""

    async def respond(self) -> Response:
        """Return the response, which is a stream if the body asks for one."""
        if self.body.stream:
            return EventStream(self._stream(), on_close=self.close, ping=self.ping)
        response = await super().respond()
        if self.body.timings:
            response.headers.update(timing_headers(self.usage.timings()))
        return response

    def _params(self, num_prompt_tokens: int) -> SamplingParams:
        params = super()._params(num_prompt_tokens)
        slo, is_streamed = params.slo or self.permit.slo, bool(self.body.stream)
        if (slo, is_streamed) == (params.slo, params.is_streamed):
            return params
        return replace(params, slo=slo, is_streamed=is_streamed)

    def logprob_writer(self, as_token_ids: bool | None = False) -> LogprobWriter:
        """A writer of logprobs with the tokenizer of the model; see `LogprobWriter`."""
        return LogprobWriter(self.llm.engine.tokenizer, bool(as_token_ids))

    def num_tokens(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.llm.engine.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    async def _stream(self) -> AsyncIterator[bytes]:
        writer = self.writer()
        num_unfinished = len(self.generations)
        try:
            if opening := writer.opening():
                yield opening
            with sent_fields_in_errors(self.body, self.plan):
                async for index, output in _interleave(self.generations):
                    self.add(output)
                    num_unfinished -= output.finished
                    chunk = await self.write(writer.size(index, output), writer.delta, index, output)
                    if num_unfinished == 0:
                        chunk += await self.write(self.usage.completion_tokens, writer.closing)
                    if chunk:
                        yield chunk
        except ChairliftError as error:
            yield writer.failure(*error_info(error, is_admin=self.record.key.is_admin))


class StreamWriter(ABC):
    """Writes the events of one call as bytes. What one method returns is sent as one chunk."""

    def opening(self) -> bytes:
        """The events before the first token; may be empty."""
        return b""

    def size(self, index: int, output: RequestOutput) -> int:
        """The size of an output that `delta` writes. Large outputs are written on a thread (see `output_size`)."""
        return output_size(output)

    @abstractmethod
    def delta(self, index: int, output: RequestOutput) -> bytes:
        """The events for new output of prompt `index`; may be empty."""

    @abstractmethod
    def closing(self) -> bytes:
        """The events after the last token."""

    def failure(self, status: int, info: ErrorInfo) -> bytes:
        """The events that end a stream which has failed."""
        return to_chunk(ErrorBody(error=info)) + DONE


class ChunkStreamWriter(StreamWriter, Generic[ChunkFields, Plans]):
    """Writes the chunks of completions and chat completions.

    Args:
        kind: the value of the field `object`.
    """

    def __init__(self, kind: str, call: GeneratingCall[ChunkFields, Plans]) -> None:
        self.call = call
        self.logprobs = call.logprob_writer(call.body.return_tokens_as_token_ids)
        self._kind = kind
        self._usage = None if call.body.include_usage else UNSET
        self._has_usage = call.body.continuous_usage_stats
        self._has_token_ids = bool(call.body.return_token_ids)

    @abstractmethod
    def answer(self, index: int, answer: CompletionOutput) -> bytes:
        """The chunk for new output of an answer to prompt `index`; may be empty."""

    def delta(self, index: int, output: RequestOutput) -> bytes:
        return b"".join(
            self.answer(index, answer)
            for answer in output.outputs
            # New tokens may not have become text yet.
            if answer.text or answer.finish_reason is not None or answer.logprobs or self._has_token_ids
        )

    def chunk(self, choice: ChunkChoice, answer: CompletionOutput | None = None) -> bytes:
        """One chunk with a choice, and with the token counts so far if the request has `continuous_usage_stats`.

        Args:
            answer: new output of the answer; None for text of the prompt.
        """
        if answer is not None and answer.finish_reason is not None:
            choice.stop_reason = answer.stop_reason
        if answer is not None and self._has_token_ids:
            choice.token_ids = answer.token_ids
        chunk = self._chunk([choice])
        if self._has_usage:
            chunk.usage = self.call.usage.usage()
        return to_chunk(chunk)

    def usage(self) -> UsageInfo:
        """The token counts at the end of the stream."""
        return self.call.usage.usage()

    def closing(self) -> bytes:
        last, body = b"", self.call.body
        if body.include_usage:
            chunk = self._chunk([])
            chunk.usage = self.usage()
            last += to_chunk(chunk)
        if body.timings and (timings := self.call.usage.timings()) is not None:
            chunk = self._chunk([])
            chunk.usage, chunk.timings = UNSET, timings
            last += to_chunk(chunk)
        return last + DONE

    def _chunk(self, choices: list[ChunkChoice]) -> Chunk:
        call = self.call
        return Chunk(call.id, self._kind, call.created, call.model, choices, self._usage)


@contextlib.contextmanager
def sent_fields_in_errors(body: CallFields, plan: RequestPlan) -> Iterator[None]:
    """Make errors that the block raises name the fields of the body. The engine may reject a grammar that the front end
    has accepted."""
    with rename_fields_in_errors(body.chat_field_names), attribute_errors_to(plan.constraint_field):
        yield


def ignored_fields(body: CallFields, plan: RequestPlan, unfollowed: tuple[str, ...] = ()) -> list[str]:
    """The fields of a body that have no effect, by the names that they have at its endpoint.

    Args:
        unfollowed: parts of the schemas of tools that the compiled grammar does not follow.
    """
    names = body.chat_field_names
    given = [*body.ignored_fields(), *(names.get(field, field) for field in plan.ignored), *unfollowed]
    ignored = list(dict.fromkeys(given))
    shown = [f"{name:.{MAX_IGNORED_CHARACTERS}}" for name in ignored[:MAX_IGNORED]]
    return shown + [f"{len(ignored) - MAX_IGNORED}-more"] * (len(ignored) > MAX_IGNORED)


def _remaining_seconds(timeout: float | None, model_seconds: float) -> float | None:
    """What is left of the timeout of a call that may have waited for its model."""
    return None if timeout is None or timeout <= 0 else max(1e-3, timeout - model_seconds)


def output_size(output: RequestOutput) -> int:
    """The number of tokens and, approximately, of logprob entries in an output. A vector counts by its bytes."""
    positions = len(output.prompt_logprobs or ()) + sum(len(answer.logprobs or ()) for answer in output.outputs)
    num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    return num_tokens + ENTRIES_PER_POSITION * positions + len(output.pooled or b"") // BYTES_PER_TOKEN


async def _interleave(generations: list[Generation]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The deltas of all generations in the order in which they arrive, with the index of the generation."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
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
