"""AsyncLLM: many streams over one engine, for servers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.core_thread import Abort, Add, EngineCoreThread
from chairlift.engine.factory import Engine, build_engine
from chairlift.engine.input_processor import Message, Prompt
from chairlift.engine.output_processor import Failure, OutputProcessor, merge
from chairlift.errors import EngineDeadError, RequestError
from chairlift.outputs import EngineCoreOutput, RequestOutput
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams


class Generation:
    """Answers on their way: iterate for what is new since the last look. A slow reader finds it merged.

    Whoever stops iterating early calls `abort`. Raises RequestError if the engine refuses the request and
    EngineDeadError if it dies.
    """

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.abort = abort
        self._news: RequestOutput | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._finished = False

    def put(self, told: RequestOutput | Failure) -> None:
        """Add a delta, on the event loop."""
        if isinstance(told, Failure):
            self._error = told.error
        else:
            self._news = merge(self._news, told)
        self._changed.set()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            self._finished = True
            raise self._error
        assert self._news is not None
        news, self._news = self._news, None
        self._finished = news.finished
        return news

    async def collect(self) -> RequestOutput:
        """The whole answer; cancelling this aborts the request."""
        total: RequestOutput | None = None
        try:
            async for delta in self:
                total = merge(total, delta)
        finally:
            self.abort()
        assert total is not None
        return total


class AsyncLLM:
    """An engine whose steps run on a thread of their own, off the event loop.

    Args:
        config: see EngineConfig; or give its fields as keywords.
        engine: an engine that was built before, instead.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ) -> None:
        self.engine = engine or build_engine(config or EngineConfig(**options))
        self._processor = OutputProcessor(self.engine.tokenizer)
        self._generations: dict[str, Generation] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core = EngineCoreThread(self.engine.core, self._on_outputs)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine can answer: it has not been started yet, or it runs."""
        return self._loop is None or self._core.is_alive

    @property
    def num_unfinished(self) -> int:
        """Prompts that are being answered."""
        return len(self._generations)

    def start(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Generation:
        """Queue a prompt that the input processor has encoded.

        Raises:
            RequestError: more tokens asked for than fit, or the request id is in use.
        """
        self._start_core()
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._generations:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request", "request_id")
        requests = self.engine.input_processor.make(request_id, token_ids, params, priority)
        core_ids = [request.request_id for request in requests]
        generation = Generation(request_id, lambda: self._end(request_id, core_ids))
        self._generations[request_id] = generation
        self._processor.add(request_id, prompt, requests)
        self._core.send(Add(requests))
        return generation

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a prompt, as deltas. Leaving the iteration early aborts the request.

        Raises:
            RequestError: the request cannot be honoured; before anything is yielded.
            EngineDeadError: the engine is gone.
        """
        text, token_ids = self.engine.input_processor.encode(prompt)
        async for output in _iterate(self.start(text, token_ids, params, request_id=request_id, priority=priority)):
            yield output

    async def chat(
        self,
        messages: list[Message],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a conversation; the rest as `generate`."""
        text, token_ids = self.engine.input_processor.encode_chat(messages, **template_options)
        async for output in _iterate(self.start(text, token_ids, params, request_id=request_id, priority=priority)):
            yield output

    def close(self) -> None:
        """Stop the engine. Streams in flight end with EngineDeadError."""
        if self._loop is not None:
            self._core.stop()
        self.engine.close()

    def _start_core(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._core.start()
        elif self._loop is not asyncio.get_running_loop():
            raise EngineDeadError("an AsyncLLM serves one event loop; make another one for this loop")

    def _on_outputs(self, outputs: list[EngineCoreOutput]) -> None:
        """On the core's thread: hand over to the event loop, which detokenizes."""
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        told, stopped = self._processor.process(outputs)
        if stopped:
            self._core.send(Abort(stopped, FinishReason.STOP))
        for news in told:
            if (generation := self._generations.get(news.request_id)) is not None:
                generation.put(news)

    def _end(self, request_id: str, core_ids: list[str]) -> None:
        """Forget a generation; the core ends what is unfinished of it."""
        if self._generations.pop(request_id, None) is not None and (unfinished := self._processor.remove(core_ids)):
            self._core.send(Abort(unfinished))


async def _iterate(generation: Generation) -> AsyncIterator[RequestOutput]:
    try:
        async for output in generation:
            yield output
    finally:
        generation.abort()
