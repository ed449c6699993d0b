"""Prepares requests off the event loop: small ones on threads of the server, large ones in preparation workers."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from chairlift.config import EngineConfig
from chairlift.engine.served_engine import EngineFacts
from chairlift.errors import EngineDeadError
from chairlift.loading.resolve import resolve_model
from chairlift.server.preparation.api_options import ApiOptions
from chairlift.server.preparation.planners import Planners, PlanningModel, PreparedRequest
from chairlift.server.preparation.worker_process import PreparationProcess, WorkerSetup, tokenizer_fingerprint
from chairlift.server.protocol.base import RequestBody

Result = TypeVar("Result")
Turn: TypeAlias = "asyncio.Future[PreparationProcess]"

NUM_THREADS: Final = 16
"""The number of threads that prepare small bodies."""

MAX_SECONDS: Final = 15.0
"""Maximum seconds for one body. Then the worker is killed and the request rejected."""

IDLE_SECONDS: Final = 10.0
"""Seconds without work after which a worker is ended, which frees its memory."""

CORES_PER_WORKER: Final = 8
"""The number of CPU cores for each worker process. There is at least one worker."""


class TenantQueues:
    """The waiting calls. Their turns come in rotation over tenants, so that no tenant waits for all calls of another.

    A turn is a future, whose result is the process that the call may use.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Turn]] = OrderedDict()

    def push(self, tenant: str, turn: Turn) -> None:
        """Append a call to the queue of its tenant."""
        self._queues.setdefault(tenant, deque()).append(turn)

    def pop(self) -> Turn | None:
        """Remove and return the next turn; return None if there is none. Cancelled turns are dropped."""
        while self._queues:
            tenant, queue = self._queues.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            if not turn.cancelled():
                return turn
        return None


class PreparationWorkers:
    """A pool of worker processes for large bodies. It must be used on one event loop.

    Args:
        setup: the data with which workers plan requests.
        num_workers: the maximum number of processes, which are started on demand. Default: by CORES_PER_WORKER.
        max_seconds: maximum seconds for one body.
        idle_seconds: seconds without work after which a worker is ended.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        num_workers: int | None = None,
        max_seconds: float = MAX_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        count = max(1, (os.cpu_count() or 1) // CORES_PER_WORKER) if num_workers is None else num_workers
        self.processes = [PreparationProcess(setup) for _ in range(count)]
        self._free = list(self.processes)
        self._queues = TenantQueues()
        self._max_seconds = max_seconds
        self._idle_seconds = idle_seconds
        self._threads = ThreadPoolExecutor(count, "preparation-worker")
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stop_error: Exception | None = None

    @classmethod
    def for_model(
        cls, config: EngineConfig, facts: EngineFacts, api: ApiOptions, planners: Planners
    ) -> PreparationWorkers:
        """The workers of a model, which use its tokenizer files on this machine."""
        fingerprint = tokenizer_fingerprint(resolve_model(config.model, accept_terms=config.accept_terms))
        return cls(WorkerSetup(config.model, config.skip_tokenizer_init, facts, api, fingerprint, planners))

    async def run(self, tenant: str, endpoint: str, body: bytes) -> PreparedRequest:
        """Prepare a body in a worker. Cancelling this call kills the worker.

        Args:
            endpoint: the path of the endpoint.

        Raises:
            RequestError: the body is invalid, exceeds a limit, or takes more than `max_seconds`.
            OverloadedError: the worker failed for a reason that is not in the body.
        """
        process = await self._wait_for_turn(tenant)
        process.prepare_call(is_cancelled=self._stop_error is not None)
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, process.run, endpoint, body, self._max_seconds)
        work.add_done_callback(partial(self._release, process))
        try:
            await asyncio.wait({work})
        finally:
            if not work.done():  # This call has been cancelled.
                process.cancel()
        outcome = work.result()
        if isinstance(outcome, PreparedRequest):
            return outcome
        raise self._stop_error or outcome

    def stop(self, error: Exception) -> None:
        """End all calls with an error, including those that wait."""
        self._stop_error = error
        for turn in iter(self._queues.pop, None):
            turn.set_exception(error)
        for process in self.processes:
            process.cancel()

    def close(self) -> None:
        """End all worker processes."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for process in self.processes:
            process.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.close()

    async def _wait_for_turn(self, tenant: str) -> PreparationProcess:
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queues.push(tenant, turn)
        self._assign_processes()
        try:
            return await turn
        except asyncio.CancelledError:
            if not turn.cancelled() and turn.exception() is None:  # The call was cancelled after it had got its turn.
                self._release(turn.result())
            raise

    def _assign_processes(self) -> None:
        while self._free and (turn := self._queues.pop()) is not None:
            turn.set_result(self._free.pop())

    def _release(self, process: PreparationProcess, _work: object = None) -> None:
        self._free.append(process)
        self._assign_processes()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._end_idle_workers)

    def _end_idle_workers(self) -> None:
        for process in self._free:
            process.close()


class Preparation:
    """Prepares the requests of a model off the event loop.

    Args:
        model: the model to plan for.
        planners: the planners of the endpoints.
        workers: the worker processes for large bodies. Without them all bodies are prepared on threads.
    """

    def __init__(self, model: PlanningModel, planners: Planners, workers: PreparationWorkers | None = None) -> None:
        self.model = model
        self._planners = planners
        self._workers = workers
        self._threads = ThreadPoolExecutor(NUM_THREADS, "preparation")

    async def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread. A cancelled call that waits is not run."""
        return await asyncio.wrap_future(self._threads.submit(function, *arguments))

    def log_template_warnings(self) -> None:
        """Check the chat template of the model on a thread."""
        self._threads.submit(self.model.conversations.log_template_warnings)

    async def plan(self, endpoint: str, body: RequestBody) -> Any:
        """Plan a body on a thread.

        Args:
            endpoint: the path of the endpoint.

        Raises:
            RequestError: the request is invalid or exceeds a limit.
        """
        return await self.run(self._planners[endpoint].plan, self.model, body)

    async def prepare(self, tenant: str, endpoint: str, raw: bytes) -> PreparedRequest:
        """Parse, validate and plan a large body in a worker (see `PreparationWorkers.run`), or on a thread if there are
        no workers."""
        if self._workers is not None:
            return await self._workers.run(tenant, endpoint, raw)
        return await self.run(self._planners[endpoint].prepare, self.model, raw)

    def stop(self, message: str) -> None:
        """End all calls that workers are preparing with an error."""
        if self._workers is not None:
            self._workers.stop(EngineDeadError(message))

    def close(self) -> None:
        """End all worker processes, and the threads after their current calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()
