"""The engine loop: schedule, execute, update; and the interface of the executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from chairlift.clock import Clock
from chairlift.core.scheduler import Scheduler
from chairlift.errors import EngineDeadError
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput
from chairlift.request import FinishReason, Request


class Executor(Protocol):
    """Executes steps in order: a model on a device, a cost model, a recording. A handle is private to the executor."""

    def submit(self, output: SchedulerOutput) -> Any:
        """Start a step, and return a handle; may return before the step is done."""

    def result(self, handle: Any) -> ModelRunnerOutput:
        """Wait for the result of a step."""


class EngineCore:
    """A scheduler and an executor, used by one thread.

    Args:
        steps_ahead: how many steps may be submitted before the oldest result is taken; 1 keeps a device busy while the
            host plans the next step, 0 suits an executor that computes in `submit`.
        on_add: called with every request that was queued.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        steps_ahead: int = 0,
        on_add: Callable[[Request], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._steps_ahead = steps_ahead
        self._on_add = on_add
        self._handles: deque[Any] = deque()
        self._failure: BaseException | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._handles)

    def now(self) -> float:
        """Seconds of the engine's clock."""
        return self._clock.now()

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served (see `Scheduler.add`)."""
        self.scheduler.add(request)
        if self._on_add is not None:
            self._on_add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Finish a request without further output. False if no such request is unfinished."""
        return self.scheduler.abort(request_id, self._clock.now(), reason)

    def step(self) -> list[EngineCoreOutput]:
        """Submit the steps that can be planned, and process the oldest result.

        Raises:
            EngineDeadError: an earlier step raised an exception, so scheduler and executor may disagree.
        """
        if self._failure is not None:
            raise EngineDeadError(f"an earlier step failed with {self._failure!r}: create a new engine")
        try:
            self.scheduler.abort_expired(self._clock.now())
            if outputs := self.scheduler.take_outbox():
                return outputs
            while len(self._handles) <= self._steps_ahead:
                output = self.scheduler.schedule(self._clock.now())
                if output is None:
                    break
                self._handles.append(self._executor.submit(output))
            if not self._handles:
                return []
            result = self._executor.result(self._handles.popleft())
            return self.scheduler.update(result, self._clock.now())
        except BaseException as error:
            self._failure = error
            raise
