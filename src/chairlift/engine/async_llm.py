"""AsyncLLM: an asynchronous interface to one engine that serves many streams."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.engine.input_processor import EngineRequest, Message, Prompt
from chairlift.engine.output_processor import AnswerBuilder, EngineUpdate, OutputProcessor
from chairlift.engine.process.client import EngineClient, EngineStatus
from chairlift.engine.process.commands import Abort, AdapterResult, Add, LoadAdapter, ReopenFiles, UnloadAdapter
from chairlift.engine.served_engine import ServedEngine
from chairlift.errors import ConfigError, EngineDeadError, RequestError
from chairlift.outputs import EngineCoreOutput, RequestOutput
from chairlift.request import FinishReason
from chairlift.sampling_params import SamplingParams

logger = logging.getLogger("chairlift")

MAX_PENDING: Final = 256
"""Maximum number of deltas that a slow reader has not read, before they are added up."""


class Generation:
    """The answers to one prompt as they are generated: an asynchronous iterator over deltas.

    A slow reader gets the deltas since the previous one as one sum. A caller that stops iterating early must call
    `abort`; further calls have no effect. The iteration raises RequestError if the engine rejects the request, and
    EngineDeadError if it dies.
    """

    def __init__(
        self,
        request_id: str,
        requests: list[EngineRequest],
        on_abort: Callable[[Generation], None],
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.tenant, self.lora_id = requests[0].tenant, requests[0].lora_id
        self.core_ids = [request.request_id for request in requests]
        self._on_abort = on_abort
        self._on_output = on_output
        self._pending: list[RequestOutput] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._ended = False

    def put(self, update: EngineUpdate) -> None:
        """Add a delta or an error. Call it on the event loop."""
        if not isinstance(update, RequestOutput):
            self.fail(update)
            return
        if self._on_output is not None:
            self._on_output(update)
        self._pending.append(update)
        if len(self._pending) > MAX_PENDING:
            self._pending = [self._take()]
        self._changed.set()

    def _take(self) -> RequestOutput:
        """Remove and add up the pending deltas. Most readers read every delta, which is then returned unchanged."""
        pending, self._pending = self._pending, []
        if len(pending) == 1:
            return pending[0]
        total = AnswerBuilder()
        for delta in pending:
            total.add(delta)
        return total.build()

    def fail(self, error: Exception) -> None:
        """End the iteration with an error. Call it on the event loop."""
        self._error = error
        self._changed.set()

    def abort(self) -> None:
        """End the iteration, and abort the requests in the engine that are unfinished."""
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
        delta = self._take()
        if delta.finished:
            self.abort()
        return delta

    async def collect(self) -> RequestOutput:
        """Wait until the request ends, and return its whole output. Cancelling this call aborts the request."""
        answer = AnswerBuilder()
        try:
            async for delta in self:
                answer.add(delta)
        finally:
            self.abort()
        return answer.build()


class AsyncLLM:
    """An engine whose steps run outside the event loop, in a separate thread or process.

    Args:
        config: the configuration of an engine in a thread.
        client: a client of a running engine, in place of `config`.
        options: fields of EngineConfig, in place of `config`.

    Attributes:
        engine: the engine's model, limits, tokenizer and input processor.
        events: the engine's events.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        client: EngineClient | None = None,
        **options: Any,
    ) -> None:
        if (config is not None or client is not None) and options:
            raise ConfigError(f"config and client cannot be combined with {', '.join(options)}: set them in the config")
        if not isinstance(config, EngineConfig | None):
            raise ConfigError(
                f"config must be an EngineConfig, got {config!r:.100}: use AsyncLLM(model=...) for a model"
            )
        if client is None:
            from chairlift.engine.process.thread_client import ThreadClient  # imports torch

            client = ThreadClient(config or EngineConfig.from_options(options))
        self._client = client
        self.events = self._client.events
        self._processor = OutputProcessor(self._client.engine.tokenizer)
        self._generations: dict[str, Generation] = {}  # by the leader's request id in the core
        self._ids_in_use: set[tuple[str, str]] = set()  # tenant and request id
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._busy_since = 0.0
        self._closing: asyncio.Future[None] | None = None
        self._adapter_results: dict[int, asyncio.Future[str | None]] = {}  # by lora_int_id
        self._adapter_is_unused: dict[int, asyncio.Event] = {}
        self._adapter_loads = asyncio.Lock()

    @property
    def engine(self) -> ServedEngine:
        return self._client.engine

    @property
    def engine_pid(self) -> int | None:
        """The id of the engine's process; None if it runs in a thread of this process."""
        return self._client.engine_pid

    @property
    def is_healthy(self) -> bool:
        """Whether the engine serves requests, now or after a restart for which requests wait."""
        return self._dead is None and self._client.unavailable is None

    @property
    def num_unfinished(self) -> int:
        """Number of prompts in progress."""
        return len(self._generations)

    def has_request(self, tenant: str, request_id: str) -> bool:
        """Whether a tenant has an unfinished request with this id."""
        return (tenant, request_id) in self._ids_in_use

    def status(self) -> EngineStatus:
        """The current state of the engine."""
        client = self._client
        since_step = client.seconds_since_step
        stalled = min(since_step, client.now() - self._busy_since) if self._processor.num_unfinished else 0.0
        state = client.state if self._dead is None else "dead"
        reason = None if client.last_failure is None else client.last_failure.reason
        return EngineStatus(state, client.restarts, since_step, self.num_unfinished, stalled, reason)

    def open(self) -> None:
        """Connect the engine to the running event loop. The first call of `start` does this as well.

        Raises:
            EngineDeadError: the engine is dead, or is connected to another loop.
        """
        if self._dead is not None:
            raise self._dead
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._client.open(self._deliver, self._fail_requests, self._finish_adapter_command)
        elif self._loop is not asyncio.get_running_loop():
            raise EngineDeadError("an AsyncLLM serves one event loop: create another AsyncLLM for this loop")

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
        lora_name: str | None = None,
        clamp_max_tokens: bool = False,
        output_len: int | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> Generation:
        """Queue a prompt that the input processor has encoded.

        Args:
            request_id: must be unique among the unfinished requests of the tenant; None generates one.
            tenant, cache_salt, deadline: see `Request`.
            lora_name: a loaded LoRA adapter; None for the model alone.
            clamp_max_tokens: whether `max_tokens` is lowered to what fits beside the prompt.
            output_len: the number of output tokens, if it is forced and less than `max_tokens`.
            on_output: called on the event loop with every delta when it arrives.

        Raises:
            RequestError: a limit is exceeded, a parameter would have no effect, or the request id is in use.
            EngineDeadError: the engine is dead.
            EngineUnavailableError: the engine is dead, and requests do not wait for its restart.
        """
        self.open()
        if (unavailable := self._client.unavailable) is not None:
            raise unavailable
        request_id = request_id or uuid.uuid4().hex
        if self.has_request(tenant, request_id):
            raise RequestError(
                f"request id {request_id!r} is in use by an unfinished request: use another one", "request_id"
            )
        lora_id = 0 if lora_name is None else self.engine.adapters.find(lora_name).lora_int_id
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
            lora_id=lora_id,
            clamp_max_tokens=clamp_max_tokens,
            output_len=output_len,
        )
        generation = self._generations[requests[0].request_id] = Generation(
            request_id, requests, self._remove, on_output
        )
        self._ids_in_use.add((tenant, request_id))
        if not self._processor.num_unfinished:
            self._busy_since = now
        self._processor.add(request_id, prompt, requests)
        self._client.send(Add.from_siblings(requests))
        return generation

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_name: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a prompt as deltas. Leaving the iteration early aborts the request.

        Args:
            lora_name: a loaded LoRA adapter; None for the model alone.

        Raises:
            RequestError: the request is invalid; raised before the first delta.
            EngineDeadError: the engine is dead.
        """
        encode = partial(self.engine.input_processor.encode, prompt, params)
        return self._stream(encode, params, request_id=request_id, priority=priority, lora_name=lora_name)

    def chat(
        self,
        messages: list[Message],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        lora_name: str | None = None,
        allow_special_tokens_in_content: bool = False,
        **template_options: Any,
    ) -> AsyncIterator[RequestOutput]:
        """Stream the answers to a conversation as deltas; see `generate`.

        Args:
            allow_special_tokens_in_content, template_options: as for `LLM.chat`.
        """
        encode = partial(
            self.engine.input_processor.encode_chat,
            messages,
            params,
            allow_special_tokens_in_content=allow_special_tokens_in_content,
            **template_options,
        )
        return self._stream(encode, params, request_id=request_id, priority=priority, lora_name=lora_name)

    async def _stream(
        self, encode: Callable[[], tuple[str | None, list[int]]], params: SamplingParams, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        params = params.clone()  # The caller may assign to its fields while the request runs.
        await self.engine.input_processor.constraints.compile_in_background(params)
        generation = self.start(*encode(), params, **options)
        try:
            async for output in generation:
                yield output
        finally:
            generation.abort()

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        """Load a LoRA adapter, which requests select by its name afterwards.

        Args:
            lora_path: a folder with adapter_config.json and adapter_model.safetensors, as the engine sees it.

        Raises:
            RequestError: the name is in use, there is no memory for another adapter, the adapter is not supported,
                does not fit the model or cannot be read, or the adapters of the engine are fixed. Nothing has changed.
            EngineDeadError: the engine is dead, or died in the meantime.
        """
        self._open_for_adapters()
        async with self._adapter_loads:
            module = self.engine.adapters.check_new(lora_name, lora_path)
            error = await self._send_adapter_command(module.lora_int_id, LoadAdapter(module))
            if error is not None:
                raise RequestError(error, "lora_path")
            self.engine.adapters.add(module)

    async def unload_lora_adapter(self, lora_name: str) -> None:
        """Let no further request select a LoRA adapter, and free its memory when its last request has ended.

        Raises:
            RequestError: the adapter is not loaded, or the adapters of the engine are fixed.
            EngineDeadError: the engine is dead.
        """
        self._open_for_adapters()
        module = self.engine.adapters.remove(lora_name)
        # The memory is freed also if the caller stops waiting.
        await asyncio.shield(asyncio.ensure_future(self._unload(module.lora_int_id)))

    def _open_for_adapters(self) -> None:
        self.open()
        if (reason := self._client.fixed_adapters) is not None:
            raise RequestError(reason, "lora_name")

    async def _unload(self, lora_id: int) -> None:
        if any(generation.lora_id == lora_id for generation in self._generations.values()):
            unused = self._adapter_is_unused[lora_id] = asyncio.Event()
            await unused.wait()
        with contextlib.suppress(EngineDeadError):  # a new engine will not have the adapter
            await self._send_adapter_command(lora_id, UnloadAdapter(lora_id))
        self.engine.adapters.release(lora_id)

    async def _send_adapter_command(self, lora_id: int, command: LoadAdapter | UnloadAdapter) -> str | None:
        """Send the command and wait for its result: the error, or None."""
        if self._dead is not None:
            raise self._dead
        result: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._adapter_results[lora_id] = result
        self._client.send(command)
        return await result

    def _finish_adapter_command(self, result: AdapterResult) -> None:
        future = self._adapter_results.pop(result.lora_id, None)
        if future is not None and not future.done():
            future.set_result(result.error)
        elif future is None and result.error is not None:
            self.engine.adapters.release(result.lora_id)
            logger.error("a LoRA adapter is lost with the engine that died: %s", result.error)

    def reopen_files(self) -> None:
        """Open the event log and the trace file again, such as after a rotation, between two steps."""
        self._client.send(ReopenFiles())

    def stop(self, reason: str = "the engine was shut down") -> None:
        """Stop the engine after its current step, without waiting; call `close` or `aclose` afterwards.

        Streams in progress, and later ones, end with an EngineDeadError with this reason.
        """
        self._client.stop()
        self._fail_requests(None, EngineDeadError(reason))

    def close(self) -> None:
        """Stop the engine as `stop` does, and block until it has ended, which may take several seconds."""
        self.stop()
        self._client.close()

    async def aclose(self, seconds: float | None = None) -> None:
        """Stop the engine as `stop` does, and wait until it has ended without blocking the event loop.

        Args:
            seconds: time after which an engine process is killed; None selects the default of ProcessClient.
        """
        self.stop()
        if self._closing is None:
            # All threads of the loop's default executor may be busy for a long time.
            executor = ThreadPoolExecutor(1, "chairlift-close")
            self._closing = asyncio.get_running_loop().run_in_executor(executor, self._client.close, seconds)
            executor.shutdown(wait=False)
        await asyncio.shield(self._closing)

    def _deliver(self, outputs: list[EngineCoreOutput]) -> None:
        updates, stopped = self._processor.process(outputs, self._client.now())
        if stopped:
            self._client.send(Abort(stopped, FinishReason.STOP))
        for leader_id, update in updates:
            self._generations[leader_id].put(update)

    def _fail_requests(self, core_ids: list[str] | None, error: EngineDeadError) -> None:
        """End requests with an error. None in place of the ids: all of them, because the engine will not run again."""
        if core_ids is None:
            self._dead = self._dead or error
            error = self._dead
        for result in self._adapter_results.values():
            if not result.done():
                result.set_exception(error)
        self._adapter_results.clear()
        lost = None if core_ids is None else set(core_ids)
        for generation in self._generations.values():
            is_lost = lost is None or not lost.isdisjoint(generation.core_ids)
            if is_lost and self._processor.remove(generation.core_ids):  # else it is complete, and only unread
                generation.fail(error)

    def _remove(self, generation: Generation) -> None:
        """Remove a generation that has ended, and abort its requests that are unfinished."""
        if self._generations.pop(generation.core_ids[0], None) is not None:
            self._ids_in_use.remove((generation.tenant, generation.request_id))
            if unfinished := self._processor.remove(generation.core_ids):
                self._client.send(Abort(unfinished))
            unused = self._adapter_is_unused.get(generation.lora_id)
            if unused is not None and all(each.lora_id != generation.lora_id for each in self._generations.values()):
                del self._adapter_is_unused[generation.lora_id]
                unused.set()
