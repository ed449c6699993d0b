"""StepGate: lets a test decide how many steps an engine computes, so that it acts at a known point of a request."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from support.waiting import AMPLE_SECONDS


class StepGate:
    """Holds the steps of engines that run in threads of this process, until a test allows them.

    A held engine has read the commands that arrived before, and has delivered the outputs of its earlier steps. As a
    context manager, it is opened at the end of the block, so that the engines can be closed.

    Args:
        cores: the cores of the engines. A step that has begun is not held.
    """

    def __init__(self, *cores: Any) -> None:
        self._permits = [threading.Semaphore(0) for _ in cores]
        self._is_open = False
        for core, permits in zip(cores, self._permits, strict=True):
            core._executor.submit = self._held(core._executor.submit, permits)

    def _held(self, submit: Any, permits: threading.Semaphore) -> Any:
        def wait_and_submit(output: Any) -> Any:
            assert self._is_open or permits.acquire(timeout=AMPLE_SECONDS)
            return submit(output)

        return wait_and_submit

    def allow(self, num_steps: int) -> None:
        """Let each engine compute this many more steps."""
        for permits in self._permits:
            permits.release(num_steps)

    def has_steps_left(self) -> bool:
        """Whether an engine has not begun all the steps that it may compute."""
        for permits in self._permits:
            if permits.acquire(blocking=False):
                permits.release()
                return True
        return False

    def open(self) -> None:
        """Let the engines compute all later steps."""
        self._is_open = True
        self.allow(1)

    def __enter__(self) -> StepGate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()
