"""The loop: schedule, execute, update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from chairlift.clock import Clock
from chairlift.core.executor import Executor
from chairlift.core.scheduler import Scheduler
from chairlift.errors import EngineDeadError
from chairlift.outputs import EngineCoreOutput
from chairlift.request import FinishReason, Request


class EngineCore:
    """A scheduler over an executor, on one thread.

    Args:
        steps_ahead: how many steps may be submitted before the oldest one's result is taken; 1 keeps a device busy
            while the host plans, 0 is right where `submit` computes.
        on_add: told of every request that was taken in.
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
        self._broken_by: BaseException | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._handles)

    def now(self) -> float:
        """The engine's time, in seconds."""
        return self._clock.now()

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError if it can never fit."""
        self.scheduler.add(request)
        if self._on_add is not None:
            self._on_add(request)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request; it gives no further output. False if there is no such request."""
        return self.scheduler.abort(request_id, self._clock.now(), reason)

    def step(self) -> list[EngineCoreOutput]:
        """Submit what can be planned, take in the oldest result.

        Raises:
            EngineDeadError: an earlier step was broken off by an error, so policy and device may disagree.
        """
        if self._broken_by is not None:
            raise EngineDeadError(f"an earlier step was broken off by {self._broken_by!r}: build a new engine")
        try:
            return self._step()
        except BaseException as error:
            self._broken_by = error
            raise

    def _step(self) -> list[EngineCoreOutput]:
        self.scheduler.expire(self._clock.now())
        if self.scheduler.has_outbox:
            return self.scheduler.take_outbox()
        while len(self._handles) <= self._steps_ahead:
            output = self.scheduler.schedule(self._clock.now())
            if output is None:
                break
            self._handles.append(self._executor.submit(output))
        if not self._handles:
            return []
        result = self._executor.result(self._handles.popleft())
        return self.scheduler.update(result, self._clock.now())
