"""What all endpoints that generate do alike: start generations, gather or stream them."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from chairlift.engine.async_llm import AsyncLLM, Generation
from chairlift.errors import ChairliftError, DeadlineError, EngineDeadError, OverloadedError, RequestError
from chairlift.outputs import CompletionOutput, RequestOutput
from chairlift.server.admission import Admission, Permit
from chairlift.server.chunks import to_event
from chairlift.server.model_check import check_model
from chairlift.server.preparation.plan import Plan, Planner, attribute_errors_to, rename_limit_in_errors
from chairlift.server.preparation.preparation import Preparation
from chairlift.server.protocol import EngineFields, ErrorBody, ErrorInfo
from chairlift.server.responses import DONE, EventStream, unless_disconnected
from chairlift.server.tally import Tally, timing_headers

MAX_ANSWERS_PER_CALL = 2048
PROMPTS_AT_ONCE = 32
"""Prompts of one call that are started before the event loop serves other calls."""


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """HTTP status and body of an error."""
    if isinstance(error, RequestError):
        info = ErrorInfo(message=str(error), type="invalid_request_error", param=error.param)
        return 400, ErrorBody(error=info)
    if isinstance(error, EngineDeadError):
        return 503, ErrorBody(error=ErrorInfo(message=str(error), type="service_unavailable_error"))
    if isinstance(error, OverloadedError):
        status, kind = (
            (503, "service_unavailable_error") if error.code == "shutting_down" else (429, "rate_limit_error")
        )
        return status, ErrorBody(error=ErrorInfo(message=str(error), type=kind, code=error.code))
    if isinstance(error, DeadlineError):
        info = ErrorInfo(message=str(error), type="timeout_error", param="timeout", code="deadline_exceeded")
        return 408, ErrorBody(error=info)
    message = str(error) if isinstance(error, ChairliftError) else "internal error"
    return 500, ErrorBody(error=ErrorInfo(message=message, type="internal_server_error"))


def error_headers(error: Exception) -> dict[str, str] | None:
    """Headers of an error: when to come back, or that this is of no use."""
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return {"x-should-retry": "false"} if isinstance(error, DeadlineError) else None


Fields = TypeVar("Fields", bound=EngineFields)
Plans = TypeVar("Plans", bound=Plan)


@dataclass(slots=True)
class Call(Generic[Fields, Plans]):
    """One API call on its way."""

    body: Fields
    plan: Plans
    generations: list[Generation]
    id: str
    model: str
    tally: Tally
    permit: Permit
    created: int = field(default_factory=lambda: int(time.time()))

    def abort(self) -> None:
        """Nobody waits for it any more, or it is done."""
        for generation in self.generations:
            generation.abort()
        self.permit.close()

    def is_late(self) -> None:
        """Its deadline has passed, and the engine says nothing."""
        for generation in self.generations:
            generation.fail(DeadlineError(f"the timeout of {self.body.timeout:g} s passed, and the engine is silent"))


class StreamWriter(ABC):
    """Writes the events of one call as bytes; what it returns at once is sent at once."""

    @abstractmethod
    def opening(self) -> bytes:
        """Before the first token."""

    @abstractmethod
    def delta(self, index: int, output: RequestOutput) -> bytes:
        """What is new of the answers to prompt `index`; may be nothing."""

    @abstractmethod
    def closing(self) -> bytes:
        """After the last token."""

    def failure(self, error: ChairliftError) -> bytes:
        """Instead of what is missing."""
        return to_event(error_body(error)[1].model_dump_json().encode()) + DONE


class Serving(ABC, Generic[Fields, Plans]):
    """One endpoint that generates.

    Args:
        model_name: what the model is called in requests and answers.
        planner: plans the requests of this endpoint.
        preparation: runs the planner, and other work that would block the event loop.
    """

    id_prefix: str

    def __init__(
        self, llm: AsyncLLM, model_name: str, planner: Planner[Fields, Plans], preparation: Preparation
    ) -> None:
        self.llm = llm
        self.model_name = model_name
        self.preparation = preparation
        self._planner = planner

    @abstractmethod
    def response(self, call: Call[Fields, Plans], outputs: list[RequestOutput]) -> BaseModel:
        """The whole answer."""

    @abstractmethod
    def writer(self, call: Call[Fields, Plans]) -> StreamWriter:
        """What writes the answer as a stream."""

    async def handle(self, body: Fields, request: Request) -> Response:
        """Answer a call.

        Raises:
            RequestError: and as `Admission.enter`; before anything is sent.
        """
        check_model(body.model, self.model_name)
        request.state.admission.check(request.state.key)
        return await unless_disconnected(request, self._plan_and_answer(body, request))

    async def answer(self, body: Fields, plan: Plans, request: Request) -> Response:
        """Answer a call that has been planned.

        Raises:
            RequestError: and as `Admission.enter`; before anything is sent.
        """
        check_model(body.model, self.model_name)
        with rename_limit_in_errors(body.limit_field):
            if plan.params.structured_outputs is not None:
                await self.preparation.run(request.state.key.tenant, self._compile_constraint, plan)
            call = await self._start(body, plan, request)
        if body.stream:
            return EventStream(self._stream(call), on_close=call.abort)
        return await self._whole(call)

    def num_tokens(self, text: str) -> int:
        """How many tokens a text is; 0 if it is empty."""
        return len(self.llm.engine.tokenizer.encode(text, add_special_tokens=False)) if text else 0

    async def _plan_and_answer(self, body: Fields, request: Request) -> Response:
        with rename_limit_in_errors(body.limit_field):
            plan = await self.preparation.run(request.state.key.tenant, self._planner.plan, body)
        return await self.answer(body, plan, request)

    def _compile_constraint(self, plan: Plans) -> None:
        with attribute_errors_to(plan.constraint_field):
            self.llm.engine.input_processor.prepare(plan.params)

    async def _start(self, body: Fields, plan: Plans, request: Request) -> Call[Fields, Plans]:
        prompts, params = plan.prompts, plan.params
        if len(prompts) * params.n > MAX_ANSWERS_PER_CALL:
            raise RequestError(
                f"{len(prompts)} prompts x n={params.n} are more than {MAX_ANSWERS_PER_CALL} answers: send several "
                "calls",
                "n",
            )
        admission: Admission = request.state.admission
        token_ids = [ids for _, ids in prompts]
        permit = admission.enter(request.state.key, token_ids, params, timeout=body.timeout, cache_salt=body.cache_salt)
        call_id = f"{self.id_prefix}{body.request_id or uuid.uuid4().hex}"
        request.state.call_id = call_id
        request.state.tally = tally = Tally(sum(map(len, token_ids)))
        call = Call(body, plan, [], call_id, self.model_name, tally, permit)
        try:
            for index, prompt in enumerate(prompts):
                request_id = call_id if len(prompts) == 1 else f"{call_id}.{index}"
                call.generations.append(self._generate(prompt, call, request_id))
                if index % PROMPTS_AT_ONCE == PROMPTS_AT_ONCE - 1:
                    await asyncio.sleep(0)
        except BaseException:
            call.abort()
            raise
        permit.on_silence(call.is_late)
        return call

    def _generate(self, prompt: tuple[str | None, list[int]], call: Call[Fields, Plans], request_id: str) -> Generation:
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
            on_output=permit.follow(len(token_ids)).note,
        )

    async def _whole(self, call: Call[Fields, Plans]) -> Response:
        try:
            outputs = await asyncio.gather(*(generation.collect() for generation in call.generations))
        finally:
            call.abort()
        for output in outputs:
            call.tally.add(output)
        content = self.response(call, list(outputs)).model_dump_json()
        headers = timing_headers(call.tally.timings()) if call.body.timings else None
        return Response(content, media_type="application/json", headers=headers)

    async def _stream(self, call: Call[Fields, Plans]) -> AsyncIterator[bytes]:
        writer = self.writer(call)
        num_unfinished = len(call.generations)
        try:
            if opening := writer.opening():
                yield opening
            async for index, output in _interleave(call.generations):
                call.tally.add(output)
                num_unfinished -= output.finished
                chunk = writer.delta(index, output)
                if num_unfinished == 0:
                    chunk += writer.closing()
                if chunk:
                    yield chunk
        except ChairliftError as error:
            yield writer.failure(error)


def has_news(answer: CompletionOutput, tells_tokens: bool | None) -> bool:
    """Whether there is anything to tell: tokens may be no text yet."""
    return bool(answer.text or answer.finish_reason is not None or answer.logprobs or tells_tokens)


async def _interleave(generations: list[Generation]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Deltas of all generations as they come, with the generation's index."""
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
