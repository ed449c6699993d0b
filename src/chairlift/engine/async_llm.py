"""AsyncLLM: many streams over one engine, for servers."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

from chairlift.config import EngineConfig
from chairlift.engine.core_thread import Abort, Add, EngineCoreThread
from chairlift.engine.factory import Engine, build_engine
from chairlift.engine.input_processor import Message, Prompt
from chairlift.engine.output_processor import Failure, OutputProcessor, merge
from chairlift.errors import EngineDeadError
from chairlift.outputs import EngineCoreOutput, RequestOutput
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams


class _Stream:
    """What is new for one user since they last looked. A slow reader finds it merged; nothing piles up."""

    def __init__(self) -> None:
        self._news: RequestOutput | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, told: RequestOutput | Failure) -> None:
        if isinstance(told, Failure):
            self._error = told.error
        else:
            self._news = merge(self._news, told)
        self._changed.set()

    async def get(self) -> RequestOutput:
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        assert self._news is not None
        news, self._news = self._news, None
        return news


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
        self._streams: dict[str, _Stream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._core = EngineCoreThread(self.engine.core, self._on_outputs)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine can answer: it has not been started yet, or it runs."""
        return self._loop is None or self._core.is_alive

    @property
    def num_unfinished(self) -> int:
        """Prompts that are being answered."""
        return len(self._streams)

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a prompt, as deltas. Leaving the iteration early aborts the request.

        Raises:
            RequestError: the request cannot be honoured; before anything is yielded.
            EngineDeadError: the engine is gone.
        """
        text, token_ids = self.engine.input_processor.encode(prompt)
        async for output in self.generate_encoded(text, token_ids, params, request_id=request_id, priority=priority):
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
        async for output in self.generate_encoded(text, token_ids, params, request_id=request_id, priority=priority):
            yield output

    async def generate_encoded(
        self,
        prompt: str | None,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for tokens that the input processor has encoded and checked."""
        self._start()
        request_id = request_id or uuid.uuid4().hex
        requests = self.engine.input_processor.make(request_id, token_ids, params, priority)
        stream = self._streams[request_id] = _Stream()
        self._processor.add(request_id, prompt, requests)
        try:
            self._core.send(Add(requests))
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            del self._streams[request_id]
            if unfinished := self._processor.remove([request.request_id for request in requests]):
                self._core.send(Abort(unfinished))

    def close(self) -> None:
        """Stop the engine. Streams in flight end with EngineDeadError."""
        if self._loop is not None:
            self._core.stop()
        self.engine.close()

    def _start(self) -> None:
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
            if (stream := self._streams.get(news.request_id)) is not None:
                stream.put(news)
