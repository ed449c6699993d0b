"""ServedModel: a model that a server offers under a name, whether it is loaded or not."""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final, Literal, TypeVar

import psutil
from starlette.exceptions import HTTPException

from chairlift.clock import Clock
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.event_hub import EventHub
from chairlift.engine.process.client import EngineStatus
from chairlift.engine.served_engine import EngineFacts
from chairlift.errors import Failure
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.server.http.streaming import run_to_end
from chairlift.server.models.model_options import ModelSpec
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.conversation import ModelPlanner
from chairlift.server.telemetry.engine_observer import EngineObserver, ObservedRequest, engine_metrics
from chairlift.server.telemetry.live_feed import LiveFeed
from chairlift.system.tenant_threads import TenantThreads

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "failed"]

Result = TypeVar("Result")

NUM_THREADS: Final = 16  # that plan the requests with small bodies and write the large outputs of a model
TENANT_THREADS: Final = 4  # of them, which one tenant uses at a time
MAX_ENDED_REPLICAS: Final = 8  # of a model, whose requests are kept


class ModelService:
    """A loaded model: its engine, which is closed with the service, and the threads that plan its requests."""

    def __init__(self, llm: AsyncLLM, api: ApiOptions) -> None:
        self.llm = llm
        self.planner = ModelPlanner(llm.engine, api)
        if llm.engine.facts.pooling is not None:
            api.log_unused(llm.engine.facts.model_name)
        self._threads = TenantThreads(NUM_THREADS, "preparation", TENANT_THREADS)

    @property
    def memory_bytes(self) -> int:
        """The memory of the engine's process as the operating system counts it; 0 if it is unknown."""
        try:
            memory = psutil.Process(self.llm.engine_pid or 0).memory_full_info()
        except (psutil.Error, OSError):
            return 0
        # The proportional size counts a page that several processes share once.
        return int(getattr(memory, "pss", memory.uss))

    def start(self) -> None:
        """Connect the engine to the running event loop."""
        self.llm.open()
        self._threads.submit("", self.planner.log_template_warnings)

    async def run(self, tenant: str, function: Callable[..., Result], *arguments: object) -> Result:
        """Call a function on a thread, for which tenants alternate; see `run_to_end`. Raises EngineDeadError if the
        service is closed."""
        try:
            return await run_to_end(self._threads.submit(tenant, function, *arguments))
        except (asyncio.CancelledError, RuntimeError):  # The threads raise these when they are shut down.
            self.llm.open()  # Raises the error with the reason if the engine has stopped.
            raise

    async def aclose(self, seconds: float | None = None) -> None:
        """Stop the engine, and the threads after their current calls; see `AsyncLLM.aclose`."""
        await self.llm.aclose(seconds)
        self._threads.shutdown()


class VisibleEngine(ABC):
    """What the API shows of an engine: the one of a model, or one of its replicas.

    Args:
        events: delivers the events of the engine, or of one engine after another.
        clock: the clock of the events; None selects the clock of this machine.

    Attributes:
        facts: the properties of the engine; None before it is loaded for the first time.
    """

    def __init__(self, name: str, events: EventHub, clock: Clock | None = None, replica_id: str | None = None) -> None:
        self.name = name
        self.events = events
        self.replica_id = replica_id
        self.facts: EngineFacts | None = None
        self.observer = EngineObserver(events, clock, replica_id=replica_id)
        self.metrics = engine_metrics(events, self.status, self.observer.tracker, name)
        self.feed = LiveFeed(self.observer.tracker)
        events.add(self.feed)

    @abstractmethod
    def status(self) -> EngineStatus:
        """The state of the engine."""


class ServedModel(VisibleEngine):
    """A model with its state, and with what is kept while it is unloaded: its metrics and its finished requests.

    Attributes:
        service: what answers its calls while it is loaded.
        failure: why it could not be loaded the last time.
        memory_bytes: the memory of its engine process, planned and then measured; 0 while it is unloaded.
        num_leases: the calls that use it now. num_waiting: the calls that wait for it.
        is_leaving: it will be unloaded as soon as its calls have ended, and new calls wait.
        loaded_at, load_seconds, last_used: in seconds of the monotonic clock.
        replicas: its engines by id, if there are several; otherwise empty.
        ended_observers: the observers of the last replicas that have ended, to find their requests.
    """

    def __init__(self, spec: ModelSpec, events: EventHub) -> None:
        super().__init__(spec.name, events)
        self.spec = spec
        self.created = int(time.time())
        self.service: ModelService | None = None
        self.state: ModelState = "unloaded"
        self.failure: Failure | None = None
        self.memory_bytes = 0
        self.num_leases = self.num_waiting = self.num_loads = 0
        self.is_leaving = False
        self.loaded_at = self.load_seconds = self.last_used = self.failed_at = 0.0
        self.loading: asyncio.Task[None] | None = None
        self.replicas: dict[str, VisibleEngine] = {}
        self.ended_observers: deque[EngineObserver] = deque(maxlen=MAX_ENDED_REPLICAS)

    @property
    def engines(self) -> list[VisibleEngine]:
        """Its replicas, or itself if there are none."""
        return [*self.replicas.values()] or [self]

    def find_sequences(self, call_id: str) -> list[ObservedRequest]:
        """The known sequences of an API call, including sequences of ended replicas, in the order of their creation.
        One that was sent again is in the order of its replicas."""
        observers = (*self.ended_observers, *(engine.observer for engine in self.engines))
        found = [sequence for observer in observers for sequence in observer.find(call_id)]
        found.sort(key=lambda sequence: _sending_order(sequence.request))
        for index, (one, following) in enumerate(pairwise(found)):
            if one.request.request_id == following.request.request_id:
                found[index] = replace(one, is_resent=True)
        return found

    def end_replica(self, replica_id: str) -> None:
        """Remove an engine that has ended; unknown ids have no effect. Its unfinished requests are lost. The requests
        that it has computed are found until MAX_ENDED_REPLICAS others have ended."""
        replica = self.replicas.pop(replica_id, None)
        if replica is None:
            return
        observer = replica.observer
        observer.tracker.end(observer.now())
        if any(observer.tracker.requests()):
            self.ended_observers.append(observer)

    def engine(self, replica_id: str | None) -> VisibleEngine:
        """One of its engines; None is the first one. Raises HTTPException if there is no such replica."""
        if replica_id is None:
            return self.engines[0]
        if replica_id not in self.replicas:
            known = ", ".join(self.replicas) or "none"
            raise HTTPException(
                404, f"model {self.name!r} has no replica {replica_id!r:.100}: the replicas are {known}"
            )
        return self.replicas[replica_id]

    @property
    def adapters(self) -> list[str]:
        """The names of its LoRA adapters; while it is unloaded those that it will be loaded with."""
        if self.service is not None:
            return [adapter.lora_name for adapter in self.service.llm.engine.adapters]
        return list(self.spec.config.lora_modules or ())

    def adapter_of(self, name: str | None) -> str | None:
        """The LoRA adapter that a call for this model selects; None for the model alone."""
        return None if name is None or name in (self.name, *self.spec.aliases) else name

    @property
    def is_idle(self) -> bool:
        """Whether no call uses it. Calls that wait for it count too, unless it leaves, because they are next."""
        is_next = self.num_waiting > 0 and not self.is_leaving
        return not self.num_leases and not self.num_unfinished and not is_next

    @property
    def num_unfinished(self) -> int:
        return 0 if self.service is None else self.service.llm.num_unfinished

    def status(self) -> EngineStatus:
        """The state of its engine, which is "unloaded" if there is none."""
        if self.service is not None:
            return self.service.llm.status()
        return EngineStatus("unloaded", 0, 0.0, 0, 0.0, None if self.failure is None else self.failure.reason)

    def set_service(self, service: ModelService) -> None:
        """Answer calls with this service from now on."""
        self.service, self.state, self.failure = service, "loaded", None
        self.facts = service.llm.engine.facts
        self.loaded_at = self.last_used = time.monotonic()
        self.num_loads += 1

    async def unload(self, seconds: float | None = None) -> None:
        """Close the service. The caller has checked that no call uses it."""
        service, self.service = self.service, None
        assert service is not None
        self.state = "unloading"
        await service.aclose(seconds)
        self.state, self.is_leaving, self.memory_bytes = "unloaded", False, 0


class ModelLease:
    """The use of a loaded model by one call, which prevents that it is unloaded. `changed` is set when the
    lease is closed."""

    def __init__(self, model: ServedModel, changed: asyncio.Event) -> None:
        self.model = model
        self._changed = changed
        self._is_closed = False
        model.num_leases += 1

    @property
    def service(self) -> ModelService:
        assert self.model.service is not None, "a model with a lease is loaded"
        return self.model.service

    def __enter__(self) -> ModelLease:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def renew(self) -> ModelLease:
        """Another lease of the same model, for a response that continues after this lease is closed."""
        return ModelLease(self.model, self._changed)

    def close(self) -> None:
        """End the use. Further calls have no effect."""
        if not self._is_closed:
            self._is_closed = True
            self.model.num_leases -= 1
            self.model.last_used = time.monotonic()
            self._changed.set()


def _sending_order(request: TrackedRequest) -> tuple[list[str | int], bool, bool, int]:
    """A key that sorts sequences as they were created, and one that was sent again as it was sent. A sequence is sent
    again only if it had no output, perhaps before its engine has reported that it was lost."""
    # The ids are in the order "x.9~9", "x.10~10.1", "x.10~10.2".
    parts = re.split(r"([0-9]+)", request.request_id.rpartition("~")[2])
    created = [int(part) if index % 2 else part for index, part in enumerate(parts)]
    return created, request.state != "lost", request.finished is not None, request.num_output_tokens
