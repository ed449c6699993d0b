"""AsyncLLM: many streams over one engine, for servers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.input_processor import Message, Prompt
from chairlift.engine.output_processor import AnswerBuilder, EngineUpdate, OutputProcessor, RequestFailure
from chairlift.engine.process.client import EngineClient, EngineStatus, ServedEngine
from chairlift.engine.process.commands import Abort, Add
from chairlift.errors import EngineDeadError, RequestError
from chairlift.outputs import EngineCoreOutput, RequestOutput
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams


class Generation:
    """Answers on their way: iterate for what is new since the last look. A slow reader finds it added up.

    Whoever stops iterating early calls `abort`, once or more often. Raises RequestError if the engine refuses the
    request and EngineDeadError if it dies.
    """

    def __init__(
        self,
        request_id: str,
        core_ids: list[str],
        on_abort: Callable[[Generation], None],
        on_output: Callable[[RequestOutput], None] | None = None,
        tenant: str = "",
    ) -> None:
        self.request_id = request_id
        self.tenant = tenant
        self.core_ids = core_ids
        self._on_abort = on_abort
        self._on_output = on_output
        self._first: RequestOutput | None = None
        self._sum: AnswerBuilder | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, told: EngineUpdate) -> None:
        """Add a delta, on the event loop."""
        if isinstance(told, RequestFailure):
            self.fail(told.error)
        else:
            if self._on_output is not None:
                self._on_output(told)
            self._add(told)
            self._changed.set()

    def _add(self, delta: RequestOutput) -> None:
        """Most readers come for each delta, so the first one is kept as it is."""
        if self._first is None:
            self._first = delta
            return
        if self._sum is None:
            self._sum = AnswerBuilder()
            self._sum.add(self._first)
        self._sum.add(delta)

    def _take(self) -> RequestOutput:
        first, total = self._first, self._sum
        self._first = self._sum = None
        assert first is not None
        return first if total is None else total.build()

    def fail(self, error: Exception) -> None:
        """End with an error, on the event loop."""
        self._error = error
        self._changed.set()

    def abort(self) -> None:
        """End it here, and in the engine if it goes on there."""
        self._ended = True
        self._changed.set()
        self._on_abort(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        await self._changed.wait()
        if self._ended:
            raise StopAsyncIteration
        if self._error is not None:
            raise self._error
        self._changed.clear()
        news = self._take()
        if news.finished:
            self.abort()
        return news

    async def collect(self) -> RequestOutput:
        """The whole answer; cancelling this aborts the request."""
        answer = AnswerBuilder()
        try:
            async for delta in self:
                answer.add(delta)
        finally:
            self.abort()
        return answer.build()


class AsyncLLM:
    """An engine whose steps run off the event loop, in a thread or a process of their own.

    Args:
        config: of an engine in a thread, see EngineConfig; or give its fields as keywords.
        client: an engine that runs already, instead.

    Attributes:
        engine: its model's name, limits, tokenizer and input processor.
        events: what happens in it; see EventHub.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        client: EngineClient | None = None,
        **options: Any,
    ) -> None:
        self._client = client or _in_thread(config or EngineConfig(**options))
        self.events = self._client.events
        self._processor = OutputProcessor(self._client.engine.tokenizer)
        self._generations: dict[str, Generation] = {}  # by the core's id of the leader
        self._ids_in_use: set[tuple[str, str]] = set()  # of whom, which
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._busy_since = 0.0
        self._closing: asyncio.Future[None] | None = None

    @property
    def engine(self) -> ServedEngine:
        return self._client.engine

    @property
    def is_healthy(self) -> bool:
        """Whether the engine can answer, now or once it has been started again."""
        return self._dead is None and self._client.unavailable is None

    @property
    def num_unfinished(self) -> int:
        """Prompts that are being answered."""
        return len(self._generations)

    def status(self) -> EngineStatus:
        """How the engine fares."""
        client = self._client
        since_step = client.seconds_since_step
        stalled = min(since_step, client.now() - self._busy_since) if self._processor.num_unfinished else 0.0
        state = client.state if self._dead is None else "dead"
        return EngineStatus(state, client.restarts, since_step, self.num_unfinished, stalled, client.last_failure)

    def open(self) -> None:
        """Serve the running event loop from now on; the first `start` does it too.

        Raises:
            EngineDeadError: the engine is gone, or serves another loop.
        """
        if self._dead is not None:
            raise self._dead
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._client.open(self._deliver, self._lose)
        elif self._loop is not asyncio.get_running_loop():
            raise EngineDeadError("an AsyncLLM serves one event loop; make another one for this loop")

    def start(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str | None = None,
        deadline: float | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> Generation:
        """Queue a prompt that the input processor has encoded.

        Args:
            request_id: told apart from those of other tenants.
            tenant, cache_salt, deadline: see `Request`.
            on_output: called on the event loop with every delta, as it comes and before it is read.

        Raises:
            RequestError: something does not fit or would have no effect, or the request id is in use.
            EngineDeadError: the engine is gone.
            EngineUnavailableError: it cannot be started again for now.
        """
        self.open()
        if (unavailable := self._client.unavailable) is not None:
            raise unavailable
        request_id = request_id or uuid.uuid4().hex
        if (tenant, request_id) in self._ids_in_use:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", "request_id")
        now = self._client.now()
        requests = self.engine.input_processor.make(
            request_id,
            token_ids,
            params,
            arrival_time=now,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            deadline=deadline,
        )
        core_ids = [request.request_id for request in requests]
        generation = Generation(request_id, core_ids, self._forget, on_output, tenant)
        self._generations[core_ids[0]] = generation
        self._ids_in_use.add((tenant, request_id))
        if not self._processor.num_unfinished:
            self._busy_since = now
        self._processor.add(request_id, prompt, requests)
        self._client.send(Add.of(requests))
        return generation

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a prompt, as deltas. Leaving the iteration early aborts the request.

        Raises:
            RequestError: the request cannot be honoured; before anything is yielded.
            EngineDeadError: the engine is gone.
        """
        await self._prepare(params)
        text, token_ids = self.engine.input_processor.encode(prompt, params)
        async for output in _iterate(self.start(text, token_ids, params, request_id=request_id, priority=priority)):
            yield output

    async def chat(
        self,
        messages: list[Message],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        allow_special_tokens_in_content: bool = False,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a conversation; the rest as `generate`.

        Args:
            allow_special_tokens_in_content: special tokens that a message spells become these tokens; otherwise they
                are plain text.
            template_options: further variables of the chat template.
        """
        await self._prepare(params)
        text, token_ids = self.engine.input_processor.encode_chat(
            messages, params, allow_special_tokens_in_content=allow_special_tokens_in_content, **template_options
        )
        async for output in _iterate(self.start(text, token_ids, params, request_id=request_id, priority=priority)):
            yield output

    def stop(self, why: str = "the engine was shut down") -> None:
        """Have the engine stop after the step it is in, and wait for nothing; `close` or `aclose` comes later. Streams
        in flight, and later ones, end with EngineDeadError, which says why."""
        self._client.stop()
        self._lose(None, EngineDeadError(why))

    def close(self) -> None:
        """Stop the engine and wait until it is gone, which blocks for up to some seconds. Otherwise as `stop`."""
        self.stop()
        self._client.close()

    async def aclose(self, seconds: float | None = None) -> None:
        """As `close`, and the event loop goes on meanwhile.

        Args:
            seconds: an engine in a process of its own is killed if it has not ended by then; see ProcessClient.
        """
        self.stop()
        if self._closing is None:
            # Threads of the loop's own executor may all be busy for a long time.
            executor = ThreadPoolExecutor(1, "chairlift-close")
            self._closing = asyncio.get_running_loop().run_in_executor(executor, self._client.close, seconds)
            executor.shutdown(wait=False)
        await asyncio.shield(self._closing)

    async def _prepare(self, params: SamplingParams) -> None:
        if params.structured_outputs is not None:
            await asyncio.to_thread(self.engine.input_processor.prepare, params)

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        told, stopped = self._processor.process(outputs, self._client.now())
        if stopped:
            self._client.send(Abort(stopped, FinishReason.STOP))
        for leader_id, news in told:
            self._generations[leader_id].put(news)

    def _lose(self, core_ids: list[str] | None, error: EngineDeadError) -> None:
        """The engine has lost these requests; None: it is gone for good, and so are all of them."""
        if core_ids is None:
            self._dead = self._dead or error
            error = self._dead
        lost = None if core_ids is None else set(core_ids)
        for generation in self._generations.values():
            if lost is None or not lost.isdisjoint(generation.core_ids):
                self._processor.remove(generation.core_ids)
                generation.fail(error)

    def _forget(self, generation: Generation) -> None:
        """A generation ended, perhaps early: then the core ends it too."""
        if self._generations.pop(generation.core_ids[0], None) is not None:
            self._ids_in_use.remove((generation.tenant, generation.request_id))
            if unfinished := self._processor.remove(generation.core_ids):
                self._client.send(Abort(unfinished))


def _in_thread(config: EngineConfig) -> EngineClient:
    from chairlift.engine.process.thread_client import ThreadClient  # loads torch

    return ThreadClient(config)


async def _iterate(generation: Generation) -> AsyncIterator[RequestOutput]:
    try:
        async for output in generation:
            yield output
    finally:
        generation.abort()
