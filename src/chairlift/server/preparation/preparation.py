"""Prepares requests off the event loop: small ones on threads of the server, large ones in preparation workers."""

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
"""The number of threads of each thread pool."""
MAX_SECONDS: Final = 15.0
"""Maximum seconds for one body. Then the worker is killed and the request rejected."""

IDLE_SECONDS: Final = 10.0
"""Seconds without work after which a worker is ended, which frees its memory."""

CORES_PER_WORKER: Final = 8
"""The number of CPU cores for each worker process. There is at least one worker."""


@dataclass(slots=True, eq=False)
class PreparationJob:
    """A large body that waits for a worker or is being prepared by it."""

    tenant: str
    endpoint: str
    body: bytes
    reply: asyncio.Future[WorkerReply]
    process: PreparationProcess | None = None


@dataclass(slots=True)
class TenantQueues:
    """The waiting jobs. They are run in rotation over tenants, so that no tenant waits for all jobs of another one."""

    _queues: OrderedDict[str, deque[PreparationJob]] = field(default_factory=OrderedDict)

    def push(self, job: PreparationJob) -> None:
        """Append a job to the queue of its tenant."""
        self._queues.setdefault(job.tenant, deque()).append(job)

    def pop(self) -> PreparationJob | None:
        """Remove and return the next job; return None if there is none. Cancelled jobs are dropped."""
        while self._queues:
            tenant, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            if not job.reply.cancelled():
                return job
        return None


class PreparationWorkers:
    """A pool of worker processes for large bodies. It must be used on one event loop.

    Args:
        setup: The data with which workers create their planners.
        num_workers: The maximum number of processes, which are started on demand. Default: by CORES_PER_WORKER.
        max_seconds: Maximum seconds for one body.
        idle_seconds: Seconds without work after which a worker is ended.
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
        """Prepare a body in a worker. Cancelling this call kills the worker.

        Raises:
            RequestError: The preparation took more than `max_seconds`.
            OverloadedError: The worker ended, or could not be started.
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
        """End all jobs with an error, including those that wait."""
        jobs = [*self._jobs, *iter(self._queues.pop, None)]
        for job in jobs:
            if not job.reply.done():
                job.reply.set_exception(error)
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        """End all worker processes."""
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
                job.reply.set_exception(self._call_error(error))
        finally:
            job.process = None
            self._jobs.discard(job)
            self._free.append(process)
            self._start_jobs()
            self._end_idle_workers_later(loop)

    def _call_error(self, error: WorkerEndedError) -> RequestError | OverloadedError:
        if error.is_timeout:
            return RequestError(
                f"parsing and tokenizing the request took more than {self._max_seconds:g} s: shorten it"
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
    """The error of a call whose preparation failed for a reason that is not in the request."""
    message = f"the request could not be prepared: {reason}; send it again, and shorten it if it fails again"
    return OverloadedError(message, 1.0, "preparation_failed")


class Preparation:
    """Prepares requests off the event loop, and reports the CPU time of this work.

    Args:
        on_cpu_seconds: Called on the event loop with a tenant and the seconds of CPU time used for it.
        workers: The worker processes for large bodies. Without them all bodies are prepared on threads.
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
        """Whether a body is large enough for a worker, and there are workers."""
        return self._workers is not None and len(body) >= LARGE_BODY

    async def run(self, tenant: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function on a thread, and charge its CPU time to a tenant. A cancelled call that waits is not run."""
        return await self._run_on(self._threads, tenant, function, *arguments)

    async def plan(self, tenant: str, planner: RequestPlanner[Fields, Result], body: Fields) -> Result:
        """Plan a body on a thread, and charge the CPU time to a tenant.

        Bodies with a chat template use another thread than other bodies. They wait for the one process that renders
        such templates, which must not delay other requests.

        Raises:
            RequestError: The request is invalid or exceeds a limit.
        """
        has_template = getattr(body, "chat_template", None) is not None
        threads = self._template_threads if has_template else self._threads
        return await self._run_on(threads, tenant, planner.plan, body)

    async def run_and_wait(self, tenant: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function that mostly waits for another process, such as the grammar compiler, as `run` does.

        It runs on separate threads, so that it does not delay functions that compute.
        """
        return await self._run_on(self._waiting_threads, tenant, function, *arguments)

    async def _run_on(
        self, threads: ThreadPoolExecutor, tenant: str, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        loop = asyncio.get_running_loop()

        def charge(seconds: float) -> None:
            # The time is charged even if the call has been cancelled.
            with contextlib.suppress(RuntimeError):  # The event loop has been closed.
                loop.call_soon_threadsafe(self._on_cpu_seconds, tenant, seconds)

        def timed() -> Result:
            with charge_cpu_time_to(charge):
                return function(*arguments)

        return await asyncio.wrap_future(threads.submit(timed))

    def start(self, function: Callable[[], None]) -> None:
        """Start to call a function on a thread, without waiting for it."""
        self._threads.submit(function)

    async def prepare(self, tenant: str, endpoint: str, body: bytes) -> PreparedRequest:
        """Prepare a large body in a worker, and charge the CPU time to a tenant.

        Args:
            endpoint: The path of the endpoint.

        Raises:
            RequestError: The body is invalid, exceeds a limit, or takes too long.
            OverloadedError: The worker failed for a reason that is not in the body.
        """
        assert self._workers is not None, "the caller must check `should_use_worker`"
        reply = await self._workers.run(tenant, endpoint, body)
        if isinstance(reply.outcome, Rejection):
            raise RequestError(reply.outcome.message, reply.outcome.param)
        if isinstance(reply.outcome, WorkerFailure):
            raise preparation_error(reply.outcome.message)
        return reply.outcome

    def stop(self, message: str) -> None:
        """End all calls that workers are preparing with an error."""
        if self._workers is not None:
            self._workers.stop(EngineDeadError(message))

    def close(self) -> None:
        """End all worker processes. Threads end after their current calls."""
        for threads in (self._threads, self._waiting_threads, self._template_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._workers is not None:
            self._workers.close()
