"""The one seam between policy and whatever computes: a model on a device, a cost model, a recording."""

from __future__ import annotations

from typing import Any, Protocol

from chairlift.outputs import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Executes steps in the order of their submission. The handle is the executor's own business."""

    def submit(self, output: SchedulerOutput) -> Any:
        """Start a step; may return before it is done."""
        ...

    def result(self, handle: Any) -> ModelRunnerOutput:
        """Wait for a step's result."""
        ...
