"""The base classes of calls that send requests to the engine: admission, generation, whole and streamed responses."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Generic, TypeVar

from starlette.responses import Response

from chairlift.counts import counted
from chairlift.engine.async_llm import Generation
from chairlift.engine.request_limits import RequestLimits
from chairlift.errors import ChairliftError, DeadlineError, RequestError
from chairlift.outputs import PrefixMatch, RequestOutput, RequestTimes
from chairlift.sampling_params import SamplingParams, check_logprobs
from chairlift.server.access.admission import Permit
from chairlift.server.access.call import Call
from chairlift.server.http.error_responses import error_info
from chairlift.server.http.streaming import COMMENT, EventStream
from chairlift.server.models.served_model import ModelLease
from chairlift.server.preparation.conversation import RequestPlan
from chairlift.server.protocol.base import CacheMiss, ErrorBody, ErrorInfo, PromptTokensDetails, Timings, UsageInfo
from chairlift.server.protocol.encoding import DONE, encode, to_chunk
from chairlift.server.protocol.sampling import CallFields, EngineFields

MAX_ANSWERS_PER_CALL: Final = 2048  # prompts times answers
ENTRIES_PER_POSITION: Final = 20  # logprobs that `output_size` assumes
BYTES_PER_TOKEN: Final = 16  # of a vector, which take as long to write as a token of text
LARGE_OUTPUT: Final = 1024  # tokens and logprobs; an output of more is written on a thread
COST_PER_ITERATION: Final = 1 << 14
"""The cost of the prompts of one call that are started before the event loop can serve other calls, in tokens of a
prompt. Those and tokens in the lists of sampling parameters are copied and encoded once."""
COST_OF_PROMPT: Final = 256
COST_OF_ANSWER: Final = 64
TOKENS_AROUND: Final = 12  # of the text on both sides of a token that differs

MAX_TOKENS_HEADER: Final = "x-chairlift-max-tokens"
"""The header of a response whose `max_tokens` was lowered: its value for the longest prompt."""
IGNORED_HEADER: Final = "x-chairlift-ignored"
"""The header of a response that names the fields of the request without an effect."""
MAX_IGNORED: Final = 24  # names
MAX_IGNORED_CHARACTERS: Final = 160  # of a name: some proxies accept only 4 KiB of headers in all

CallBody = TypeVar("CallBody", bound=CallFields)
Fields = TypeVar("Fields", bound=EngineFields)
Plans = TypeVar("Plans", bound=RequestPlan)


@dataclass(slots=True)
class CallUsage:
    """The token counts and times of one API call, over all of its prompts and answers.

    Attributes:
        num_choices: the number of finished answers.
        times: the times of the answer that finished last.
        finish_reason: the reason of the answer that finished first.
        cache_miss: why no more of the prompt was cached; None with several prompts.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    disk_tokens: int = 0
    cache_miss: CacheMiss | None = None
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
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=self.cached_tokens, disk_tokens=self.disk_tokens or None, cache_miss=self.cache_miss
            ),
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


class EngineCall(ABC, Generic[CallBody, Plans]):
    """One call of an endpoint that uses the engine, from its admission to its end.

    Args:
        record: what all layers of the server know of the call.
        permit: counts the call until it is closed.
        lease: the lease of its model, which the call renews, because a stream continues after it.

    Attributes:
        id_prefix: the beginning of the ids of responses.
    """

    id_prefix: ClassVar[str]

    def __init__(self, record: Call, permit: Permit, lease: ModelLease, body: CallBody, plan: Plans) -> None:
        self.record, self.permit, self.body, self.plan = record, permit, body, plan
        self._lease, self._service = lease, lease.service
        self.llm = lease.service.llm
        self.lora_name = lease.model.adapter_of(body.model)
        self.model = record.model = self.lora_name or lease.model.name
        self.id = f"{self.id_prefix}{body.request_id or record.request_id}"
        self.created = int(time.time())
        self.usage = CallUsage(sum(len(token_ids) for _, token_ids in plan.prompts))
        self.generations: list[Generation] = []

    async def serve(self) -> Response:
        """Answer the call; raises ChairliftError before anything of the response is sent."""
        unfollowed: tuple[str, ...] = ()
        if self.plan.params.structured_outputs is not None:
            constraints = self.llm.engine.input_processor.constraints
            unfollowed = await constraints.compile_in_background(self.plan.params, self.permit.tenant)
        check_size(self.plan, self.llm.engine.input_processor.limits)
        await self._start()
        self.record.ignored = ignored = self._ignored_fields(unfollowed)
        response = await self.respond()
        if (lowered := self._lowered_max_tokens()) is not None:
            response.headers[MAX_TOKENS_HEADER] = str(lowered)
        if ignored:
            response.headers[IGNORED_HEADER] = ", ".join(ignored)
        return response

    async def _start(self) -> None:
        """Admit the call, and send its requests to the engine. Its timeout includes the wait for its model."""
        prompts, record, timeout = self.plan.prompts, self.record, self.body.timeout
        left = None if timeout is None else max(1e-3, timeout - record.model_seconds)
        params = self.plan.params
        self.permit.admit(
            [token_ids for _, token_ids in prompts],
            num_answers=params.n,
            params_size=params.size,
            timeout=left,
            cache_salt=self.body.cache_salt,
            is_pooling=self.llm.engine.facts.pooling is not None,
        )
        params = self.sampling_params()
        request_ids = self._request_ids()
        is_used = any(self.llm.has_request(self.permit.tenant, each) for each in request_ids)
        if self.body.request_id is None and (is_used or self.body.is_stored(self.id)):
            # Proxies send one id in the headers of several calls, and of retries.
            self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
            request_ids = self._request_ids()
        record.id, self._lease = self.id, self._lease.renew()
        cost = 0
        try:
            for prompt, request_id in zip(prompts, request_ids, strict=True):
                self.generations.append(self._generate(prompt, request_id, params))
                cost += COST_OF_PROMPT + params.n * COST_OF_ANSWER + len(prompt[1]) + params.size
                if cost >= COST_PER_ITERATION:
                    cost = 0
                    await asyncio.sleep(0)
        except BaseException:
            self.close()
            raise
        self.permit.call_after_deadline(self._fail_after_deadline)

    def _request_ids(self) -> list[str]:
        num_prompts = len(self.plan.prompts)
        return [self.id] if num_prompts == 1 else [f"{self.id}.{index}" for index in range(num_prompts)]

    def _generate(self, prompt: tuple[str | None, list[int]], request_id: str, params: SamplingParams) -> Generation:
        text, token_ids = prompt
        return self.llm.start(
            text,
            token_ids,
            params,
            request_id=request_id,
            priority=0 if "priority" in self.plan.ignored else self.body.priority or 0,
            tenant=self.permit.tenant,
            cache_salt=self.permit.cache_salt,
            deadline=self.permit.deadline,
            lora_name=self.lora_name,
            clamp_max_tokens=self.clamps_max_tokens,
            on_output=self.permit.track_prompt(len(token_ids), params.n),
        )

    def sampling_params(self) -> SamplingParams:
        """The sampling parameters of all prompts of the admitted call."""
        return self.plan.params

    @property
    def clamps_max_tokens(self) -> bool:
        """Whether `max_tokens` is lowered to what fits beside a prompt."""
        return False

    def _lowered_max_tokens(self) -> int | None:
        """The `max_tokens` of the longest prompt, if it was lowered to what fits."""
        num_tokens = max(len(token_ids) for _, token_ids in self.plan.prompts)
        most = self.llm.engine.input_processor.limits.max_output_tokens(num_tokens)
        return most if self.clamps_max_tokens and (self.plan.params.max_tokens or 0) > most else None

    def close(self) -> None:
        """Abort the generations that still run, and close the permit."""
        for generation in self.generations:
            generation.abort()
        self.permit.close()
        self._lease.close()

    def _fail_after_deadline(self) -> None:
        """End all generations with an error, because the deadline has passed and the engine does not respond."""
        message = f"the timeout of {self.body.timeout:g} s has passed and the engine does not respond"
        for generation in self.generations:
            generation.fail(DeadlineError(message))

    def _ignored_fields(self, unfollowed: tuple[str, ...]) -> list[str]:
        """The fields of the body that have no effect, and the `unfollowed` parts of schemas, by their names at its
        endpoint."""
        names, given = self.body.chat_field_names, self.body.ignored_fields()
        for name in (*self.plan.ignored, *unfollowed):
            field, dot, path = name.partition(".")
            given.append(f"{names.get(field, field)}{dot}{path}")
        ignored = list(dict.fromkeys(given))
        shown = [f"{name:.{MAX_IGNORED_CHARACTERS}}" for name in ignored[:MAX_IGNORED]]
        return shown + [f"{len(ignored) - MAX_IGNORED}-more"] * (len(ignored) > MAX_IGNORED)

    def add(self, output: RequestOutput) -> None:
        """Count an output: a complete answer, or a delta of one."""
        self.usage.add(output)
        if output.prefix is not None:
            self.usage.disk_tokens += output.prefix.num_disk_tokens
            if len(self.generations) == 1:
                self.usage.cache_miss = cache_miss(
                    output.prefix, output.prompt_token_ids, self.llm.engine.tokenizer.decode
                )
        self.record.finish_reason = self.usage.finish_reason

    async def write(self, size: int, function: Callable[..., bytes], *arguments: object) -> bytes:
        """Call a function that writes output of this size: on a thread if it would block the event loop."""
        if size <= LARGE_OUTPUT:
            return function(*arguments)
        return await self._service.run(self.permit.tenant, function, *arguments)

    async def collect_outputs(self) -> list[RequestOutput]:
        """Wait for the complete outputs, one after the other, because a call for vectors may have thousands."""
        return [await generation.collect() for generation in self.generations]

    async def respond(self) -> Response:
        """Wait for the complete outputs, and return the whole response."""
        try:
            outputs = await self.collect_outputs()
        finally:
            self.close()
        for output in outputs:
            self.add(output)
        content = await self.write(sum(map(output_size, outputs)), lambda: encode(self.response(outputs)))
        return Response(content, media_type="application/json")

    @abstractmethod
    def response(self, outputs: list[RequestOutput]) -> Any:
        """The body of a response that is not streamed, which `encode` can write."""


class GeneratingCall(EngineCall[Fields, Plans]):
    """The base class of calls that generate, whose responses may be streams.

    A stream is what `opening`, `delta` and `closing` return as bytes; what one of them returns is sent as one chunk.

    Attributes:
        ping: what a silent stream of the endpoint sends.
        pings_after_event: whether it also does so after its first event.
    """

    ping: ClassVar[bytes] = COMMENT
    pings_after_event: ClassVar[bool] = True

    def opening(self) -> bytes:
        """The events before the first token; may be empty."""
        return b""

    @abstractmethod
    def delta(self, index: int, output: RequestOutput) -> bytes:
        """The events for new output of prompt `index`; may be empty."""

    @abstractmethod
    def closing(self) -> bytes:
        """The events after the last token."""

    def failure(self, status: int, info: ErrorInfo) -> bytes:
        """The events that end a stream which has failed."""
        return to_chunk(ErrorBody.of(status, info)) + DONE

    def size(self, index: int, output: RequestOutput) -> int:
        """The size of an output that `delta` writes. Large outputs are written on a thread (see `output_size`)."""
        return output_size(output)

    async def collect_outputs(self) -> list[RequestOutput]:
        """Wait for the complete outputs, or for the first error."""
        return await asyncio.gather(*(generation.collect() for generation in self.generations))

    async def respond(self) -> Response:
        """Return the response, which is a stream if the body asks for one."""
        if self.body.stream:
            interval = self._service.planner.options.sse_ping_interval
            return EventStream(
                self._stream(), self.close, self.ping, ping_seconds=interval, pings_after_event=self.pings_after_event
            )
        response = await super().respond()
        if (timings := self.timings()) is not None:
            spans = {"queue": timings.queue, "prefill": timings.prefill, "decode": timings.decode}
            parts = (f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items())  # in milliseconds
            response.headers["Server-Timing"] = ", ".join(parts)
        return response

    async def _stream(self) -> AsyncIterator[bytes]:
        num_unfinished = len(self.generations)
        try:
            if opening := self.opening():
                yield opening
            with self.body.errors_with_own_names():
                async for index, output in _interleave(self.generations):
                    self.add(output)
                    num_unfinished -= output.finished
                    chunk = await self.write(self.size(index, output), self.delta, index, output)
                    if num_unfinished == 0:
                        chunk += await self.write(self.usage.completion_tokens, self.closing)
                    if chunk:
                        yield chunk
        except ChairliftError as error:
            yield self.failure(*error_info(error, is_admin=self.record.key.is_admin))

    def sampling_params(self) -> SamplingParams:
        params, body = self.plan.params, self.body
        given = {
            "slo": params.slo or self.permit.slo,
            "is_streamed": bool(body.stream),
            "prompt_cache_key": body.prompt_cache_key,
            "prompt_cache_retention": body.retention,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value != getattr(params, name)}
        return replace(params, **changes) if changes else params

    @property
    def clamps_max_tokens(self) -> bool:
        return self.body.clamps_max_tokens or self._service.planner.options.clamp_max_tokens

    def timings(self) -> Timings | None:
        """The times of the call, if the body asks for them."""
        return self.usage.timings() if self.body.timings else None

    def num_tokens(self, text: str) -> int:
        return len(self.llm.engine.tokenizer.encode(text, add_special_tokens=False)) if text else 0


def cache_miss(prefix: PrefixMatch, token_ids: list[int], decode: Callable[..., str]) -> CacheMiss | None:
    """Why the prefix cache had no more of the caller's prompt, with the text around the first token that differs; None
    if it had all that it can have."""
    if prefix.reason is None:
        return None
    at, text, idle = prefix.position, None, prefix.idle_seconds
    if at is not None:
        text = decode(token_ids[max(0, at - TOKENS_AROUND) : at + TOKENS_AROUND], skip_special_tokens=False)
    return CacheMiss(reason=prefix.reason, token=at, text=text, idle_seconds=idle)


def check_size(plan: RequestPlan, limits: RequestLimits) -> None:
    """Raise RequestError if the response to a plan may have more than MAX_ANSWERS_PER_CALL answers, or more than
    MAX_LOGPROB_ENTRIES logprobs."""
    params, num_answers = plan.params, len(plan.prompts) * plan.params.n
    if limits.is_pooling:
        return
    if num_answers > MAX_ANSWERS_PER_CALL:
        raise RequestError(
            f"{counted(len(plan.prompts), 'prompt')} with n={params.n} would produce {num_answers} answers, but at "
            f"most {MAX_ANSWERS_PER_CALL} are allowed per call: split the prompts into several calls",
            "n",
        )
    check_logprobs(sum(limits.num_logprobs(params, len(token_ids)) for _text, token_ids in plan.prompts))


def output_size(output: RequestOutput) -> int:
    """The number of tokens and, approximately, of logprob entries in an output. A vector or a score counts by its bytes
    and the tokens of its prompt, which `pair_scores` compares."""
    positions = len(output.prompt_logprobs or ()) + sum(len(answer.logprobs or ()) for answer in output.outputs)
    num_tokens = sum(len(answer.token_ids) for answer in output.outputs)
    if output.pooled is not None:
        num_tokens += 1 + (len(output.pooled) + len(output.prompt_token_ids)) // BYTES_PER_TOKEN
    return num_tokens + ENTRIES_PER_POSITION * positions


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
