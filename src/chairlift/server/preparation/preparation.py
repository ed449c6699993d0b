"""Where requests are prepared: small ones on threads of the server, large ones by preparation workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from chairlift.errors import EngineDeadError, OverloadedError, RequestError
from chairlift.server.http.body_limits import LARGE_BODY
from chairlift.server.preparation.request_plan import Fields, RequestPlanner
from chairlift.server.preparation.worker_process import (
    PreparationProcess,
    PreparedRequest,
    Rejection,
    WorkerEndedError,
    WorkerFailure,
    WorkerReply,
    WorkerSetup,
)
from chairlift.system.cpu_account import charge_cpu_time_to

Result = TypeVar("Result")

NUM_THREADS: Final = 16
MAX_SECONDS: Final = 15.0
"""Time that a worker may take for one body. After it the worker is ended and the request rejected."""

IDLE_SECONDS: Final = 10.0
"""A worker without work for so long is ended, which returns its memory."""

CORES_PER_WORKER: Final = 8


@dataclass(slots=True, eq=False)
class PreparationJob:
    """One large body that waits for a worker, or is being prepared by one."""

    tenant: str
    endpoint: str
    body: bytes
    reply: asyncio.Future[WorkerReply]
    process: PreparationProcess | None = None


@dataclass(slots=True)
class TenantQueues:
    """Jobs in the order in which they are run: one of each tenant in rotation, so that no tenant waits for all jobs of
    another one."""

    _queues: OrderedDict[str, deque[PreparationJob]] = field(default_factory=OrderedDict)

    def push(self, job: PreparationJob) -> None:
        """Append a job to the queue of its tenant."""
        self._queues.setdefault(job.tenant, deque()).append(job)

    def pop(self) -> PreparationJob | None:
        """Remove and return the next job; None if there is none. Jobs that were cancelled are dropped."""
        while self._queues:
            tenant, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            if not job.reply.cancelled():
                return job
        return None


class PreparationWorkers:
    """Runs jobs on worker processes. On one event loop.

    Args:
        num_workers: processes at most; each is started when it is first needed.
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
        self._running: set[asyncio.Task[None]] = set()
        self._jobs: set[PreparationJob] = set()
        self.on_cpu_seconds: Callable[[str, float], None] = lambda _tenant, _seconds: None

    async def run(self, tenant: str, endpoint: str, body: bytes) -> WorkerReply:
        """Prepare a body. Cancelling this ends the work for it.

        Raises:
            RequestError: it took too long.
            OverloadedError: the worker ended, or could not be started.
        """
        job = PreparationJob(tenant, endpoint, body, asyncio.get_running_loop().create_future())
        self._queues.push(job)
        self._start_jobs()
        try:
            return await job.reply
        finally:
            if job.reply.cancelled() and job.process is not None:
                self.on_cpu_seconds(tenant, job.process.cpu_seconds())
                job.process.kill()

    def stop(self, error: Exception) -> None:
        """End all jobs, those that wait too, with an error."""
        jobs = [*self._jobs, *iter(self._queues.pop, None)]
        for job in jobs:
            if not job.reply.done():
                job.reply.set_exception(error)
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End all workers."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for process in self.processes:
            process.kill()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self.processes:
            process.close()

    def _start_jobs(self) -> None:
        while self._free and (job := self._queues.pop()) is not None:
            job.process = self._free.pop()
            self._jobs.add(job)
            task = asyncio.ensure_future(self._run_job(job, job.process))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run_job(self, job: PreparationJob, process: PreparationProcess) -> None:
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(self._threads, process.run, job.endpoint, job.body, self._max_seconds)
            self.on_cpu_seconds(job.tenant, 0.0 if job.reply.cancelled() else reply.cpu_seconds)
            if not job.reply.done():
                job.reply.set_result(reply)
        except WorkerEndedError as error:
            self.on_cpu_seconds(job.tenant, 0.0 if job.reply.cancelled() else error.cpu_seconds)
            if not job.reply.done():
                job.reply.set_exception(self._error_of(error))
        finally:
            job.process = None
            self._jobs.discard(job)
            self._free.append(process)
            self._start_jobs()
            self._end_idle_workers_later(loop)

    def _error_of(self, error: WorkerEndedError) -> RequestError | OverloadedError:
        """The error of a call whose worker gave no reply."""
        if error.took_too_long:
            return RequestError(
                f"reading and tokenizing this request took more than {self._max_seconds:g} s: shorten it"
            )
        return preparation_error(str(error))

    def _end_idle_workers_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = loop.call_later(self._idle_seconds, self._end_idle_workers)

    def _end_idle_workers(self) -> None:
        for process in self._free:
            process.close()


def preparation_error(reason: str) -> OverloadedError:
    """The error of a call that could not be prepared for a reason that is not in the request."""
    message = f"this request could not be read: {reason}; send it again, and shorten it if it fails again"
    return OverloadedError(message, 1.0, "preparation_failed")


class Preparation:
    """Prepares requests off the event loop, and reports the CPU time that this takes.

    Args:
        workers: for large bodies; without them all bodies are prepared on threads.
        on_cpu_seconds: called on the event loop with the tenant and the CPU time of a piece of work for it.
    """

    def __init__(
        self,
        on_cpu_seconds: Callable[[str, float], None],
        workers: PreparationWorkers | None = None,
    ) -> None:
        self._workers = workers
        self._on_cpu_seconds = on_cpu_seconds
        self._threads = ThreadPoolExecutor(NUM_THREADS, "preparation")
        self._waiting_threads = ThreadPoolExecutor(NUM_THREADS, "preparation-wait")
        self._template_threads = ThreadPoolExecutor(1, "preparation-template")
        if workers is not None:
            workers.on_cpu_seconds = on_cpu_seconds

    def should_use_worker(self, body: bytes) -> bool:
        """Whether a worker should prepare this body."""
        return self._workers is not None and len(body) >= LARGE_BODY

    async def run(self, tenant: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread, at the expense of a tenant. Cancelling this drops a call that has not begun."""
        return await self._run_on(self._threads, tenant, function, *arguments)

    async def plan(self, tenant: str, planner: RequestPlanner[Fields, Result], body: Fields) -> Result:
        """Let a planner plan a body on a thread. Bodies with a chat template of their own have a thread of their own,
        because one process runs these templates: waiting for it must not delay other requests.

        Raises:
            RequestError: the request cannot be honoured.
        """
        threads = self._template_threads if planner.has_template(body) else self._threads
        return await self._run_on(threads, tenant, planner.plan, body)

    async def run_and_wait(self, tenant: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """As `run`, for a function that mostly waits for another process, such as for a grammar: it has threads of its
        own, so that it does not delay what only computes."""
        return await self._run_on(self._waiting_threads, tenant, function, *arguments)

    async def _run_on(
        self, threads: ThreadPoolExecutor, tenant: str, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        loop = asyncio.get_running_loop()

        def charge(seconds: float) -> None:
            # Also if the call was cancelled meanwhile: the time was taken all the same.
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._on_cpu_seconds, tenant, seconds)

        def timed() -> Result:
            with charge_cpu_time_to(charge):
                return function(*arguments)

        return await asyncio.wrap_future(threads.submit(timed))

    def start(self, function: Callable[[], None]) -> None:
        """Call a function on a thread, and wait for nothing."""
        self._threads.submit(function)

    async def prepare(self, tenant: str, endpoint: str, body: bytes) -> PreparedRequest:
        """Let a worker prepare a large body for an endpoint, at the expense of a tenant.

        Raises:
            RequestError: the body is wrong, cannot be honoured, or takes too long.
            OverloadedError: the worker failed, for a reason that is not in the body.
        """
        assert self._workers is not None, "see `should_use_worker`"
        reply = await self._workers.run(tenant, endpoint, body)
        if isinstance(reply.outcome, Rejection):
            raise RequestError(reply.outcome.message, reply.outcome.param)
        if isinstance(reply.outcome, WorkerFailure):
            raise preparation_error(reply.outcome.message)
        return reply.outcome

    def stop(self, message: str) -> None:
        """End all calls that workers prepare with an error."""
        if self._workers is not None:
            self._workers.stop(EngineDeadError(message))

    def close(self) -> None:
        """End all workers; threads end after the call that they are in."""
        for threads in (self._threads, self._waiting_threads, self._template_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()
