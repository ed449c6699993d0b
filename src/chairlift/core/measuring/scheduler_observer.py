"""SchedulerObserver: the hooks that a scheduler calls, of which each does nothing unless a subclass overrides it."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.kv.kv_cache_manager import MemoryDemand, TableChange
from chairlift.errors import RequestError
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request, WaitReason


class SchedulerObserver:
    """Receives what happens to requests and steps, and influences no decision but the estimated time of steps."""

    def record_rejection(self, request: Request, error: RequestError) -> None:
        """A request cannot be served."""

    def record_queued(self, request: Request, now: float) -> None:
        """A request starts to wait, as its status says: it is parked, or it joins the queue after its arrival, after a
        preemption, or after it was parked."""

    def record_blocked(self, head: Request, reason: WaitReason, now: float, demand: MemoryDemand | None = None) -> None:
        """The head of the queue is not in the step that is planned. `demand` is what its admission would take, if that
        differs from what the KV memory reports."""

    def record_admission(self, request: Request, now: float) -> None:
        """A request has joined the running batch, and has its memory."""

    def record_table_change(self, request: Request, change: TableChange, now: float) -> None:
        """The block tables of a running request have changed."""

    def record_accepted_drafts(self, request: Request, count: int, scheduled_time: float) -> None:
        """The step that was scheduled at this time has computed `count` draft tokens that were accepted."""

    def record_preemption(self, request: Request, is_swapped: bool, displacing: Request | None, now: float) -> None:
        """A request is being preempted: it still has its progress and memory. `is_swapped`: its K and V are kept in
        the swap space; `displacing`: the head of the queue that takes its seat, if memory is not short."""

    def record_step(self, output: SchedulerOutput, requests: Sequence[Request], now: float) -> None:
        """A step is planned. Draft tokens are not added yet, and siblings that it releases not queued. `requests` are
        those of `output.num_scheduled_tokens`, in this order."""

    def record_result(self, result: ModelRunnerOutput, finished: list[str], now: float) -> None:
        """The result of the oldest step is processed, which ended the requests `finished`."""

    def record_finish(self, request: Request, now: float) -> None:
        """A request ends, which still has its status and its memory."""
