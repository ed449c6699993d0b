"""ModelManager: loads the models of a server when calls need them, and unloads them, within a budget of memory.

    unloaded --- first call ---> loading ---> loaded --- idle for keep_alive, or memory is needed ---> unloading --+
       ^                            |                                                                              |
       |                          failed: its calls end with the reason, and a later call tries again              |
       +-----------------------------------------------------------------------------------------------------------+

One model is loaded at a time, in the order of the first calls for them. A model with calls is never unloaded. If no
idle model can make room, the least recently used ones leave: they end their calls, while new calls wait. The waits of
calls are remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Final

from starlette.exceptions import HTTPException

from chairlift.errors import (
    ChairliftError,
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineUnavailableError,
    Failure,
    OverloadedError,
    RequestError,
)
from chairlift.server.access.call import Call
from chairlift.server.access.keys import Key
from chairlift.server.models.engine_loader import EngineLoader
from chairlift.server.models.served_model import ModelLease, ServedModel
from chairlift.server.telemetry.engine_observer import ObservedRequest
from chairlift.system.memory_amounts import format_memory

logger = logging.getLogger("chairlift")

SWEEP_SECONDS: Final = 0.5
MAX_WAITING_CALLS: Final = 1024  # for models to be loaded
MAX_WAITS: Final = 4096  # calls whose waits for a model are kept
RETRY_SECONDS: Final = 5.0
"""Calls for a model that could not be loaded fail for this time with the same reason, before it is tried again."""

RESIDENCE_FACTOR: Final = 4.0
"""A busy model keeps its memory for at least this multiple of the time in which it was loaded, so that a server with
too little memory for its load spends at most a fifth of the time on loading."""


class ModelNameError(HTTPException):
    """The request names a model that this server does not serve, or that its key may not use. `code` is the reason."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(status, message)
        self.code = code


class _NotNeededError(Exception):
    """All calls that waited for a model have ended before there was memory for it."""


@dataclass(slots=True)
class ModelWait:
    """The wait of a call until its model was loaded.

    Attributes:
        began, ended: in seconds of the monotonic clock; `ended` is None while it waits.
        error: why the call ended without a model.
    """

    call_id: str
    tenant: str
    model: ServedModel
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        """The duration so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    def describe(self) -> str:
        """One sentence with the reason of the wait."""
        name = self.model.name
        if self.error is not None:
            return f"The call waited {self.seconds:.1f} s for model {name!r}, and ended with: {self.error}"
        if self.ended is not None:
            return f"The call waited {self.seconds:.1f} s until model {name!r} was loaded."
        if self.model.state == "loading":
            reason = "is being loaded"
        elif self.model.is_leaving:
            reason = "makes room for another one first"
        else:
            reason = "waits for its turn and for memory"
        return f"The call has waited for {self.seconds:.1f} s: model {name!r} {reason}."


class ModelManager:
    """The models of a server. It must be used on one event loop.

    Args:
        models: the models; calls without a model use the first one.
        loader: starts engines; None if all models are loaded already, and never unloaded.
        budget: maximum memory of all engine processes in bytes; None is no limit.

    Attributes:
        waits: the last calls that waited for a model, by call id, the oldest first.
    """

    def __init__(
        self, models: Sequence[ServedModel], loader: EngineLoader | None = None, budget: int | None = None
    ) -> None:
        self.models = list(models)
        self.budget = budget
        self._by_name = {name: model for model in models for name in (model.name, *model.spec.aliases)}
        self._loader = loader
        self.waits: OrderedDict[str, ModelWait] = OrderedDict()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None
        self._stop_reason: str | None = None

    @property
    def default(self) -> ServedModel:
        """The model of calls that name none."""
        return self.models[0]

    @property
    def memory_bytes(self) -> int:
        return sum(model.memory_bytes for model in self.models)

    @property
    def num_waiting(self) -> int:
        return sum(model.num_waiting for model in self.models)

    def find(self, name: str | None, key: Key) -> ServedModel:
        """The model that a call names, by its own name or the name of one of its LoRA adapters. Raises ModelNameError
        if no model has this name, or the key is limited to other models."""
        allowed = self.visible(key)
        model = (allowed or [self.default])[0] if name is None else self._find_by_name(name)
        if model is None:
            known = [each for model in allowed for each in (model.name, *model.adapters)]
            close = [f"did you mean {each!r}?" for each in get_close_matches((name or "")[:100], known, 1)]
            hint = " ".join((*close, f"use {' or '.join(map(repr, known))}"))
            if len(self.models) == 1:
                hint += " or leave out model"
            raise ModelNameError(404, f"model {name!r:.100} is not served here: {hint}", "model_not_found")
        if model not in allowed:
            names = ", ".join(each.name for each in allowed) or "none of the models of this server"
            message = f"API key {key.name!r} may not use model {model.name!r}; it may use {names}"
            raise ModelNameError(403, message, "model_not_allowed")
        return model

    def _find_by_name(self, name: str) -> ServedModel | None:
        with_adapter = (model for model in self.models if name in model.adapters)
        return self._by_name.get(name) or next(with_adapter, None)

    async def load_adapter(self, name: str, path: str, model_name: str | None, key: Key) -> ServedModel:
        """Load a LoRA adapter of a model, which is loaded first if necessary; returns the model. Raises RequestError if
        the name is in use, or as `AsyncLLM.load_lora_adapter`."""
        model = self.find(model_name, key)
        if self._find_by_name(name) not in (None, model) or name in self._by_name:
            message = f"lora_name={name!r:.100} is the name of a model or of its adapter: use another name"
            raise RequestError(message, "lora_name")
        with await self.acquire(model) as lease:
            await lease.service.llm.load_lora_adapter(name, path)
        return model

    async def unload_adapter(self, name: str, key: Key) -> None:
        """Unload a LoRA adapter when its last request has ended. Raises ModelNameError if it is not loaded."""
        model = None if self._find_by_name(name) is None else self.find(name, key)
        if model is None or model.service is None or name not in model.adapters:
            loaded = [repr(each) for model in self.visible(key) if model.service is not None for each in model.adapters]
            known = ", ".join(loaded) or "none"
            message = f"lora_name={name!r:.100} is not loaded; the loaded adapters are: {known}"
            raise ModelNameError(404, message, "model_not_found")
        await model.service.llm.unload_lora_adapter(name)

    def visible(self, key: Key) -> list[ServedModel]:
        """The models that a key may use."""
        return [model for model in self.models if key.models is None or model.name in key.models]

    def find_sequences(self, call_id: str) -> list[ObservedRequest]:
        """The known sequences of an API call in the engines of all models."""
        return [sequence for model in self.models for sequence in model.find_sequences(call_id)]

    async def lease(self, id_prefix: str, body: object, call: Call) -> ModelLease:
        """Wait until the model that a body selects is loaded, and use it. The caller must close the lease.

        Args:
            id_prefix: the beginning of the id of the call, if it waits.
            body: a valid body, which may have the fields `model`, `request_id` and `timeout`.

        Raises:
            ModelNameError, EngineUnavailableError: the model cannot be used.
            DeadlineError: the timeout of the call has passed before the model was loaded.
        """
        model = self.find(getattr(body, "model", None), call.key)
        return self.try_acquire(model) or await self._wait_for_model(model, id_prefix, body, call)

    async def _wait_for_model(self, model: ServedModel, id_prefix: str, body: object, call: Call) -> ModelLease:
        request_id = getattr(body, "request_id", None) or call.request_id
        wait = ModelWait(f"{id_prefix}{request_id}", call.key.tenant, model)
        self.waits[wait.call_id] = wait
        while len(self.waits) > MAX_WAITS:
            self.waits.popitem(last=False)
        timeout: float | None = getattr(body, "timeout", None)
        try:
            async with asyncio.timeout(timeout):
                return await self.acquire(model)
        except TimeoutError:
            wait.error = f"the timeout of {timeout:g} s has passed while model {model.name!r} was not loaded"
            raise DeadlineError(wait.error) from None
        except ChairliftError as error:
            wait.error = error.text(is_admin=call.key.is_admin)
            raise
        except BaseException as error:
            wait.error = str(error) or "the client disconnected"
            raise
        finally:
            wait.ended = time.monotonic()
            call.model_seconds = wait.seconds
            if wait.error is not None:
                call.id = wait.call_id

    async def acquire(self, model: ServedModel) -> ModelLease:
        """Wait until a model is loaded, and use it. The caller must close the lease.

        Raises:
            EngineUnavailableError: the model cannot be loaded.
            OverloadedError: too many calls wait for models.
            EngineDeadError: the server stops.
        """
        if (lease := self.try_acquire(model)) is not None:
            return lease
        if self.num_waiting >= MAX_WAITING_CALLS:
            message = f"{self.num_waiting} calls wait for models to be loaded, which is the maximum: try again later"
            raise OverloadedError(message, max(1.0, model.load_seconds), "queue_full")
        model.num_waiting += 1
        try:
            while (lease := self.try_acquire(model)) is None:
                await self._wait_for_load(model)
        finally:
            model.num_waiting -= 1
            self._changed.set()
        return lease

    def try_acquire(self, model: ServedModel) -> ModelLease | None:
        """Use a model if it is loaded and does not leave; otherwise return None."""
        if model.state != "loaded" or model.is_leaving:
            return None
        return ModelLease(model, self._changed)

    def check_running(self) -> None:
        """Raise EngineDeadError if the server stops."""
        if self._stop_reason is not None:
            raise EngineDeadError(self._stop_reason)

    async def _wait_for_load(self, model: ServedModel) -> None:
        self.check_running()
        if model.failure is not None and time.monotonic() - model.failed_at < RETRY_SECONDS:
            raise _load_error(model.name, model.failure, model.failed_at)
        if model.loading is None or model.loading.done():  # Its callback may not have run yet.
            model.loading = asyncio.create_task(self._load(model))
            model.loading.add_done_callback(partial(_forget_loading, model))
        await asyncio.shield(model.loading)

    async def _load(self, model: ServedModel) -> None:
        """Load a model after those before it, and after others have made room for it."""
        async with self._turn:
            if model.state == "loaded":
                model.is_leaving = False
                return
            try:
                await self._load_now(model)
            except _NotNeededError:
                logger.info("model %r is not loaded, because no call waits for it any more", model.name)
            except asyncio.CancelledError:
                model.state, model.memory_bytes = "unloaded", 0
                raise EngineDeadError(self._stop_reason or "the server stops") from None
            except Exception as error:
                if not isinstance(error, ChairliftError):
                    logger.exception("model %r could not be loaded", model.name)
                model.state, model.memory_bytes = "failed", 0
                model.failure, model.failed_at = Failure(str(error) or repr(error)), time.monotonic()
                logger.warning("model %r could not be loaded: %s", model.name, model.failure)
                raise _load_error(model.name, model.failure, model.failed_at) from error
            finally:
                for other in self.models:
                    other.is_leaving = False
                self._changed.set()

    async def _load_now(self, model: ServedModel) -> None:
        assert self._loader is not None
        budget = self.budget
        config, required = await asyncio.to_thread(self._loader.plan, model.spec, budget)
        if budget is not None:
            if required.total > budget:
                raise ConfigError(
                    f"model {model.name!r} needs {required}, and models_memory_bytes={format_memory(budget)}: "
                    "raise --models-memory-bytes, or lower kv_cache_memory_bytes of the model"
                )
            await self._make_room(model, required.total, budget)
        started = time.monotonic()
        model.state, model.memory_bytes = "loading", required.total
        logger.info("loading model %r: %s", model.name, required)
        service = await self._loader.load(model, config)
        service.start()
        model.set_service(service)
        model.load_seconds = time.monotonic() - started
        model.memory_bytes = max(required.total, service.memory_bytes)
        self._log(model, "loaded", model.load_seconds, "a call needed it")

    async def _make_room(self, model: ServedModel, needed: int, budget: int) -> None:
        """Unload models, the least recently used ones first, until `needed` bytes are free."""
        while (missing := self.memory_bytes + needed - budget) > 0:
            self._changed.clear()
            victims = models_to_unload((other for other in self.models if other.state == "loaded"), missing)
            for victim in victims:
                if victim.is_idle:
                    await self._unload(victim, f"memory was needed for model {model.name!r}")
                elif time.monotonic() - victim.loaded_at >= RESIDENCE_FACTOR * victim.load_seconds:
                    victim.is_leaving = True
            if not model.num_waiting:
                raise _NotNeededError
            if self.memory_bytes + needed > budget:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SWEEP_SECONDS):
                        await self._changed.wait()

    async def _unload(self, model: ServedModel, reason: str) -> None:
        started = time.monotonic()
        await model.unload()
        self._log(model, "unloaded", time.monotonic() - started, reason)

    def _log(self, model: ServedModel, change: str, seconds: float, reason: str) -> None:
        memory = format_memory(self.memory_bytes)
        logger.info("model %r %s in %.2f s (%s); all models: %s", model.name, change, seconds, reason, memory)

    async def load(self, name: str, key: Key) -> ServedModel:
        """Load a model, as a call for it would; raises as `find` and `acquire`."""
        model = self.find(name, key)
        (await self.acquire(model)).close()
        return model

    async def unload(self, name: str, key: Key) -> ServedModel:
        """Unload a model. Raises HTTPException if it has unfinished calls, or this manager has no loader."""
        model = self.find(name, key)
        if self._loader is None:
            raise HTTPException(409, f"model {model.name!r} is always loaded: start the server with --keep-alive")
        async with self._turn:
            if not model.is_idle:
                raise HTTPException(409, f"model {model.name!r} has unfinished calls: wait until they have ended")
            if model.state == "loaded":
                await self._unload(model, "it was requested")
        return model

    def open(self) -> None:
        """Connect loaded models to the running event loop, and start to unload models that are not used."""
        for model in self.models:
            if model.service is not None:
                model.service.start()
        if self._loader is not None:
            self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            for model in self.models:
                if model.num_unfinished:
                    model.last_used = now
                if (reason := _reason_to_unload(model, now)) is not None and not self._turn.locked():
                    async with self._turn:
                        if model.is_idle and model.state == "loaded":
                            try:
                                await self._unload(model, reason)
                            except Exception:
                                logger.exception("model %r could not be unloaded", model.name)

    def stop(self, reason: str) -> None:
        """End all calls with an error, without waiting; call `aclose` afterwards."""
        self._stop_reason = reason
        if self._loader is not None:
            self._loader.abort()
        for model in self.models:
            if model.loading is not None:
                model.loading.cancel()
            if model.service is not None:
                model.service.llm.stop(reason)

    async def aclose(self, seconds: float | None = None) -> None:
        """Stop all engines, and wait until they have ended; see `AsyncLLM.aclose`."""
        self.stop(self._stop_reason or "the engine was shut down")
        if self._sweeper is not None:
            self._sweeper.cancel()
        services = [model.service for model in self.models if model.service is not None]
        await asyncio.gather(*(service.aclose(seconds) for service in services))

    def close(self) -> None:
        """Stop all engines, and block until they have ended, after the event loop has ended."""
        for model in self.models:
            if model.service is not None:
                model.service.llm.close()
        if self._loader is not None:
            self._loader.close()


def models_to_unload(loaded: Iterable[ServedModel], missing: int) -> list[ServedModel]:
    """The models to unload so that `missing` bytes become free: idle ones before busy ones, and the least recently used
    ones first; all of them if they are not enough."""
    victims: list[ServedModel] = []
    for model in sorted(loaded, key=lambda model: (not model.is_idle, model.last_used)):
        if missing <= 0:
            break
        victims.append(model)
        missing -= model.memory_bytes
    return victims


def _reason_to_unload(model: ServedModel, now: float) -> str | None:
    if model.state != "loaded" or not model.is_idle:
        return None
    status = model.status()
    if status.state in ("cannot_restart", "dead"):
        return f"its engine cannot be restarted: {status.last_failure}"
    if model.spec.keep_alive is None or now - model.last_used < model.spec.keep_alive:
        return None
    return f"no call for {model.spec.keep_alive:g} s"


def _forget_loading(model: ServedModel, task: asyncio.Task[None]) -> None:
    if model.loading is task:
        model.loading = None
    if not task.cancelled():
        task.exception()  # Marks it as retrieved, because all calls that waited for it may have been cancelled.


def _load_error(name: str, failure: Failure, failed_at: float) -> EngineUnavailableError:
    advice = f"It is tried again after {RETRY_SECONDS:g} s."
    reason, public = (f"model {name!r} cannot be loaded: {text}. {advice}" for text in failure.texts)
    seconds = max(0.0, RETRY_SECONDS - (time.monotonic() - failed_at))
    return EngineUnavailableError(reason, public, seconds, "model_load_failed")
