"""The base classes of endpoints with a request body: planning, generation, complete and streamed responses."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM, Generation
from chairlift.engine.pooling import check_task
from chairlift.errors import ChairliftError, DeadlineError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.server.access.admission import AdmissionController, Permit
from chairlift.server.api.call_usage import CallUsage, timing_headers
from chairlift.server.api.logprobs import LogprobWriter
from chairlift.server.api.stream_chunks import DONE, NULL, encode
from chairlift.server.http.error_responses import error_body
from chairlift.server.http.streaming import EventStream
from chairlift.server.preparation.preparation import Preparation
from chairlift.server.preparation.request_plan import (
    RequestPlan,
    RequestPlanner,
    attribute_errors_to,
    check_logprobs,
    rename_fields_in_errors,
)
from chairlift.server.protocol.base import RequestBody, UsageInfo
from chairlift.server.protocol.sampling import CallFields, EngineFields, SamplingFields

MAX_ANSWERS_PER_CALL: Final = 2048
"""The maximum number of prompts times answers of one call."""

ENTRIES_PER_POSITION: Final = 20
"""Logprob entries that `output_size` assumes for one position."""

IGNORED_HEADER: Final = "x-chairlift-ignored"
"""The header of a response that names the fields of the request without an effect."""

LARGE_OUTPUT: Final = 1024
"""An output of more tokens and logprob entries than this is written on a thread."""

PROMPTS_PER_ITERATION: Final = 32
"""Prompts of one call that are started before the event loop can serve other calls."""

CallBody = TypeVar("CallBody", bound=CallFields)
Fields = TypeVar("Fields", bound=EngineFields)
ChunkFields = TypeVar("ChunkFields", bound=SamplingFields)
Plans = TypeVar("Plans", bound=RequestPlan)
Body = TypeVar("Body", bound=RequestBody)
Result = TypeVar("Result")


class Closeable(Protocol):
    """What a call holds until it ends."""

    def close(self) -> None: ...


@dataclass(slots=True)
class ApiCall(Generic[CallBody, Plans]):
    """One call of an endpoint that uses the engine, from its admission to its end."""

    body: CallBody
    plan: Plans
    generations: list[Generation]
    id: str
    model: str
    usage: CallUsage
    permit: Permit
    lease: Closeable
    lora_name: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        """Abort the generations that still run, and close the permit."""
        for generation in self.generations:
            generation.abort()
        self.permit.close()
        self.lease.close()

    def fail_after_deadline(self) -> None:
        """End all generations with an error, because the deadline has passed and the engine does not respond."""
        for generation in self.generations:
            generation.fail(
                DeadlineError(f"the timeout of {self.body.timeout:g} s has passed and the engine does not respond")
            )


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

    def failure(self, error: ChairliftError) -> bytes:
        """The events that end a stream which has failed."""
        return b"data: %b\n\n" % error_body(error)[1].model_dump_json().encode() + DONE


class ChunkStreamWriter(StreamWriter, Generic[ChunkFields, Plans]):
    """Writes the chunks of completions and chat completions.

    Args:
        kind: the value of the field `object`.
        logprobs: writes the logprobs of the call.
    """

    def __init__(self, kind: str, call: ApiCall[ChunkFields, Plans], logprobs: LogprobWriter) -> None:
        self.call = call
        self.logprobs = logprobs
        self._head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"choices":[' % (
            encode(call.id),
            encode(kind),
            call.created,
            encode(call.model),
        )
        self._tail = b'],"usage":null}\n\n' if call.body.include_usage else b"]}\n\n"

    @abstractmethod
    def answer(self, index: int, answer: CompletionOutput) -> bytes:
        """The chunk for new output of an answer to prompt `index`; may be empty."""

    def delta(self, index: int, output: RequestOutput) -> bytes:
        has_token_ids = self.call.body.return_token_ids
        return b"".join(
            self.answer(index, answer)
            for answer in output.outputs
            # New tokens may not have become text yet.
            if answer.text or answer.finish_reason is not None or answer.logprobs or has_token_ids
        )

    def chunk(
        self,
        index: int,
        text: bytes,
        logprobs: bytes,
        answer: CompletionOutput | None = None,
        reason: str | None = None,
    ) -> bytes:
        """One chunk with a choice, and with the token counts so far if the request has `continuous_usage_stats`.

        Args:
            index: the index of the choice.
            text: the fields of the choice that contain text.
            answer: new output of the answer; None for text of the prompt.
            reason: the finish reason in the response, if the answer has finished.
        """
        ending = NULL
        if answer is not None and answer.finish_reason is not None:
            ending = b'%b,"stop_reason":%b' % (encode(reason), encode(answer.stop_reason))
        if answer is not None and self.call.body.return_token_ids:
            ending += b',"token_ids":%b' % encode(answer.token_ids)
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}' % (index, text, logprobs, ending)
        if self.call.body.continuous_usage_stats:
            return self._usage_chunk(choice, self.call.usage.usage())
        return self._head + choice + self._tail

    def usage(self) -> UsageInfo:
        """The token counts at the end of the stream."""
        return self.call.usage.usage()

    def closing(self) -> bytes:
        body = self.call.body
        last = self._usage_chunk(b"", self.usage()) if body.include_usage else b""
        if body.timings and (timings := self.call.usage.timings()) is not None:
            last += b'%b],"timings":%b}\n\n' % (self._head, timings.model_dump_json().encode())
        return last + DONE

    def _usage_chunk(self, choice: bytes, usage: UsageInfo) -> bytes:
        return b'%b%b],"usage":%b}\n\n' % (self._head, choice, usage.model_dump_json().encode())


class Endpoint(ABC, Generic[Body, Result]):
    """The base class of endpoints with a request body.

    Args:
        model_name: the name of the model in requests and responses.
        planner: plans the requests of this endpoint.
        preparation: runs the planner, and other work that would block the event loop.
    """

    def __init__(
        self, llm: AsyncLLM, model_name: str, planner: RequestPlanner[Body, Result], preparation: Preparation
    ) -> None:
        self.llm = llm
        self.model_name = model_name
        self.preparation = preparation
        self._planner = planner

    @abstractmethod
    async def respond(self, body: Body, request: Request, plan: Result | None = None) -> Response:
        """Answer a call.

        Args:
            plan: the plan that a preparation worker has computed; None to plan the body here.

        Raises:
            RequestError, OverloadedError, DeadlineError: before anything of the response is sent.
        """

    async def plan(self, body: Body, request: Request) -> Result:
        """Plan a body on a thread."""
        return await self.preparation.plan(self._planner, body)


class UtilityServing(Endpoint[RequestBody, bytes]):
    """An endpoint that runs nothing on the engine. Its planner computes the body of the response."""

    async def respond(self, body: RequestBody, request: Request, plan: bytes | None = None) -> Response:
        with request.app.state.admission.admit_utility_call(request.state.key, request.state.slot):
            content = await self.plan(body, request) if plan is None else plan
        return Response(content, media_type="application/json")


class CallServing(Endpoint[CallBody, Plans]):
    """The base class of endpoints that send requests to the engine."""

    id_prefix: str

    async def _start(self, body: CallBody, plan: Plans, request: Request) -> ApiCall[CallBody, Plans]:
        prompts, params = plan.prompts, plan.params
        if len(prompts) * params.n > MAX_ANSWERS_PER_CALL:
            raise RequestError(
                f"{len(prompts)} prompts with n={params.n} would produce {len(prompts) * params.n} answers, but at "
                f"most {MAX_ANSWERS_PER_CALL} are allowed per call: split the prompts into several calls",
                "n",
            )
        check_logprobs(plan, self.llm.engine.input_processor.limits)
        admission: AdmissionController = request.app.state.admission
        token_ids = [ids for _, ids in prompts]
        permit = admission.admit(
            request.state.key,
            token_ids,
            params,
            timeout=_remaining_seconds(body.timeout, request),
            cache_salt=body.cache_salt,
            slot=request.state.slot,
        )
        request_id = body.request_id or getattr(request.state, "request_id", None) or uuid.uuid4().hex
        call_id = f"{self.id_prefix}{request_id}"
        request.state.call_id = call_id
        request.state.usage = usage = CallUsage(sum(map(len, token_ids)))
        lora_name = request.state.lease.model.adapter_of(body.model)
        model, lease = lora_name or self.model_name, request.state.lease.renew()
        call = ApiCall(body, plan, [], call_id, model, usage, permit, lease, lora_name)
        try:
            for index, prompt in enumerate(prompts):
                request_id = call_id if len(prompts) == 1 else f"{call_id}.{index}"
                call.generations.append(self._generate(prompt, call, request_id))
                if index % PROMPTS_PER_ITERATION == PROMPTS_PER_ITERATION - 1:
                    await asyncio.sleep(0)
        except BaseException:
            call.close()
            raise
        permit.call_after_deadline(call.fail_after_deadline)
        return call

    def _generate(
        self, prompt: tuple[str | None, list[int]], call: ApiCall[CallBody, Plans], request_id: str
    ) -> Generation:
        text, token_ids = prompt
        permit = call.permit
        return self.llm.start(
            text,
            token_ids,
            call.plan.params,
            request_id=request_id,
            priority=call.body.priority or 0,
            tenant=permit.tenant,
            cache_salt=permit.cache_salt,
            deadline=permit.deadline,
            lora_name=call.lora_name,
            on_output=permit.track_prompt(len(token_ids)).record_output,
        )

    async def _write(
        self, call: ApiCall[CallBody, Plans], size: int, function: Callable[..., bytes], *arguments: Any
    ) -> bytes:
        """Call a function that writes output of this size: on a thread if it would block the event loop."""
        if size <= LARGE_OUTPUT:
            return function(*arguments)
        return await self.preparation.run(function, *arguments)


class Serving(CallServing[Fields, Plans]):
    """The base class of endpoints that generate."""

    @abstractmethod
    def response(self, call: ApiCall[Fields, Plans], outputs: list[RequestOutput]) -> BaseModel:
        """The body of the response to a call that does not stream."""

    @abstractmethod
    def writer(self, call: ApiCall[Fields, Plans]) -> StreamWriter:
        """The writer of the response to a call that streams."""

    async def respond(self, body: Fields, request: Request, plan: Plans | None = None) -> Response:
        check_task(self.llm.engine.facts, None)
        if plan is None:
            request.app.state.admission.check_token_rate(request.state.key)
            plan = await self.plan(body, request)
        with rename_fields_in_errors(body.chat_field_names):
            if plan.params.structured_outputs is not None:
                await self.preparation.run_and_wait(self._compile_constraint, plan)
            call = await self._start(body, plan, request)
        request.state.ignored = ignored = _ignored_fields(body, plan)
        if body.stream:
            response: Response = EventStream(self._stream(call), on_close=call.close)
        else:
            response = await self._whole_response(call)
        if ignored:
            response.headers[IGNORED_HEADER] = ", ".join(ignored)
        return response

    def logprob_writer(self, as_token_ids: bool | None = False) -> LogprobWriter:
        """A writer of logprobs with the tokenizer of the model; see `LogprobWriter`."""
        return LogprobWriter(self.llm.engine.tokenizer, bool(as_token_ids))

    def num_tokens(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.llm.engine.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    def _compile_constraint(self, plan: Plans) -> None:
        with attribute_errors_to(plan.constraint_field):
            self.llm.engine.input_processor.prepare(plan.params)

    async def _whole_response(self, call: ApiCall[Fields, Plans]) -> Response:
        try:
            outputs = await asyncio.gather(*(generation.collect() for generation in call.generations))
        finally:
            call.close()
        for output in outputs:
            call.usage.add(output)
        size = sum(map(output_size, outputs))
        content = await self._write(call, size, self._response_json, call, list(outputs))
        headers = timing_headers(call.usage.timings()) if call.body.timings else None
        return Response(content, media_type="application/json", headers=headers)

    def _response_json(self, call: ApiCall[Fields, Plans], outputs: list[RequestOutput]) -> bytes:
        # Large parts of a response are JSON already (`msgspec.Raw`), which is not the declared type of their fields.
        return encode(self.response(call, outputs).model_dump(warnings=False))

    async def _stream(self, call: ApiCall[Fields, Plans]) -> AsyncIterator[bytes]:
        writer = self.writer(call)
        num_unfinished = len(call.generations)
        try:
            if opening := writer.opening():
                yield opening
            async for index, output in _interleave(call.generations):
                call.usage.add(output)
                num_unfinished -= output.finished
                chunk = await self._write(call, writer.size(index, output), writer.delta, index, output)
                if num_unfinished == 0:
                    chunk += await self._write(call, call.usage.completion_tokens, writer.closing)
                if chunk:
                    yield chunk
        except ChairliftError as error:
            yield writer.failure(error)


def _ignored_fields(body: EngineFields, plan: RequestPlan) -> list[str]:
    """The fields of a body that have no effect, by the names that they have at its endpoint."""
    names = body.chat_field_names
    return [*body.ignored_fields(), *(names.get(field, field) for field in plan.ignored)]


def _remaining_seconds(timeout: float | None, request: Request) -> float | None:
    """What is left of the timeout of a call that may have waited for its model."""
    return None if timeout is None or timeout <= 0 else max(1e-3, timeout - request.state.model_seconds)


def output_size(output: RequestOutput) -> int:
    """The number of tokens and, approximately, of logprob entries in an output."""
    positions = len(output.prompt_logprobs or ()) + sum(len(answer.logprobs or ()) for answer in output.outputs)
    return sum(len(answer.token_ids) for answer in output.outputs) + ENTRIES_PER_POSITION * positions


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
