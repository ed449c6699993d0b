"""Where requests are prepared: small ones on threads of the server, large ones by preparation workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from chairlift.errors import RequestError
from chairlift.server.http.body_limits import LARGE_BODY
from chairlift.server.preparation.process import PreparationProcess, Prepared, Rejection, Reply, WorkerSetup

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
    reply: asyncio.Future[Reply]
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

    async def run(self, tenant: str, endpoint: str, body: bytes) -> Reply:
        """Prepare a body. Cancelling this ends the work for it.

        Raises:
            RequestError: it took too long, or the worker ended.
        """
        job = PreparationJob(tenant, endpoint, body, asyncio.get_running_loop().create_future())
        self._queues.push(job)
        self._start_jobs()
        try:
            return await job.reply
        finally:
            if job.reply.cancelled() and job.process is not None:
                job.process.kill()

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
            task = asyncio.ensure_future(self._run_job(job, job.process))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run_job(self, job: PreparationJob, process: PreparationProcess) -> None:
        loop = asyncio.get_running_loop()
        try:
            reply = await loop.run_in_executor(self._threads, process.run, job.endpoint, job.body, self._max_seconds)
            outcome: Reply | RequestError = reply
        except TimeoutError:
            outcome = RequestError(
                f"reading and tokenizing this request took more than {self._max_seconds:g} s: shorten it"
            )
        except EOFError:
            outcome = RequestError("the process that read this request ended, perhaps for want of memory: shorten it")
        job.process = None
        if not job.reply.done():
            if isinstance(outcome, Reply):
                job.reply.set_result(outcome)
            else:
                job.reply.set_exception(outcome)
        self._free.append(process)
        self._start_jobs()
        self._end_idle_workers_later(loop)

    def _end_idle_workers_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = loop.call_later(self._idle_seconds, self._end_idle_workers)

    def _end_idle_workers(self) -> None:
        for process in self._free:
            process.close()


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

    def should_use_worker(self, body: bytes) -> bool:
        """Whether a worker should prepare this body."""
        return self._workers is not None and len(body) >= LARGE_BODY

    async def run(self, tenant: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread, at the expense of a tenant. Cancelling this drops a call that has not begun."""
        seconds = 0.0

        def timed() -> Result:
            nonlocal seconds
            started = time.thread_time()
            try:
                return function(*arguments)
            finally:
                seconds = time.thread_time() - started

        try:
            return await asyncio.wrap_future(self._threads.submit(timed))
        finally:
            self._on_cpu_seconds(tenant, seconds)

    def start(self, function: Callable[[], None]) -> None:
        """Call a function on a thread, and wait for nothing."""
        self._threads.submit(function)

    async def prepare(self, tenant: str, endpoint: str, body: bytes) -> Prepared:
        """Let a worker prepare a large body for an endpoint, at the expense of a tenant.

        Raises:
            RequestError: the body is wrong, cannot be honoured, or takes too long.
        """
        assert self._workers is not None, "see `should_use_worker`"
        reply = await self._workers.run(tenant, endpoint, body)
        self._on_cpu_seconds(tenant, reply.cpu_seconds)
        if isinstance(reply.outcome, Rejection):
            raise RequestError(reply.outcome.message, reply.outcome.param)
        return reply.outcome

    def close(self) -> None:
        """End all workers; threads end after the call that they are in."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()
