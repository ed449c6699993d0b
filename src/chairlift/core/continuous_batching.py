"""The interface of a batching policy, and continuous batching: the batch is chosen anew at every step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from chairlift.core.chunk_allowance import ChunkAllowance
from chairlift.core.running_batch import RunningBatch, StepPlan
from chairlift.outputs import EngineCoreOutput
from chairlift.request import Request, WaitReason


class BatchingPolicy(ABC):
    """Decides which requests a step computes, and when requests leave the batch. By default they leave it as soon as
    they finish.

    Attributes:
        name: the value of `SchedulerConfig.batching` that selects this policy.
        retains_finished: a finished request keeps its seat and its memory until `take_completed` returns it.
    """

    name: str
    retains_finished = False

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch

    def check(self, request: Request) -> None:  # noqa: B027
        """Raise RequestError if this policy cannot serve the request. Called once for each arriving request."""

    @abstractmethod
    def fill(self, plan: StepPlan) -> None:
        """Schedule running requests and admit waiting ones, within the limits of the configuration."""

    def buffer(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Take the outputs of a step, and return those that leave the engine now."""
        return outputs

    def take_completed(self, now: float) -> Iterable[tuple[Request, EngineCoreOutput | None]]:
        """Return the finished requests that leave the batch now, with their buffered outputs; None: it gets no output.

        Called only when no step is in flight.
        """
        return ()


class ContinuousBatching(BatchingPolicy):
    """Iteration-level scheduling (Orca; Yu et al., OSDI'22, section 3.1): running requests first, then waiting ones,
    within the token budget and `max_num_seqs`. Prompts are computed in chunks (Sarathi-Serve; Agrawal et al., OSDI'24,
    section 4). When memory is short, the running request with the largest key is preempted (Kwon et al., SOSP'23,
    section 4.5). It comes after all requests already scheduled in the step, so no scheduled token is taken back.
    """

    name = "continuous"

    def __init__(self, batch: RunningBatch) -> None:
        super().__init__(batch)
        self._has_chunks = batch.config.enable_chunked_prefill

    def fill(self, plan: StepPlan) -> None:
        chunks = ChunkAllowance(self._batch.config.step_time, self._batch.running)
        budget, has_preempted = self._schedule_running(plan, chunks)
        self._schedule_waiting(plan, budget, chunks, may_admit=not has_preempted)

    def _schedule_running(self, plan: StepPlan, chunks: ChunkAllowance) -> tuple[int, bool]:
        """Schedule the uncomputed tokens of every running request; returns the rest of the token budget, and whether a
        request was preempted.

        A chunk leaves one token of the budget to every request behind it and to every waiting request that has a free
        seat, so a decode never stalls behind a prompt and a free seat is taken in the next step. There is always room
        for that, because max_num_batched_tokens >= max_num_seqs. The estimated time of the step may allow less.
        """
        batch = self._batch
        running = batch.running
        budget = batch.config.max_num_batched_tokens
        num_running, num_admissible = len(running), batch.num_admissible
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if count > 1:
                count = chunks.take(start, min(count, budget - num_admissible - (len(running) - index)))
            elif not count or request.num_tokens == request.end_total_tokens:
                continue
            if start + count > request.num_slots and not self._grow(request, start + count, plan):
                break
            batch.schedule_tokens(request, start, count, plan)
            budget -= count
        return budget, len(running) < num_running

    def _grow(self, request: Request, num_slots: int, plan: StepPlan) -> bool:
        """Extend the request's memory, preempting from the end of the batch; False if it preempted the request."""
        while not self._batch.grow(request, num_slots, plan):
            if self._batch.preempt_last(plan) is request:
                return False
        return True

    def _schedule_waiting(self, plan: StepPlan, budget: int, chunks: ChunkAllowance, may_admit: bool) -> None:
        """Admit from the head of the queue while there are seats, tokens and memory."""
        batch = self._batch
        while (request := batch.waiting.peek()) is not None:
            reason = self._allocate(request, budget) if may_admit else WaitReason.PREEMPTION
            if reason is not None:
                batch.block_queue(request, reason, plan)
                return
            batch.admit(request, plan)
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if self._has_chunks:
                count = chunks.take(start, min(count, budget - batch.num_admissible))
            if start + count > request.num_slots:
                has_grown = batch.grow(request, start + count, plan)
                assert has_grown, "admission has checked that blocks are free for the windows"
            batch.schedule_tokens(request, start, count, plan)
            budget -= count

    def _allocate(self, request: Request, budget: int) -> WaitReason | None:
        """Allocate memory to the head of the queue; the reason if it has to wait.

        Args:
            budget: the rest of the token budget of the step.
        """
        if len(self._batch.running) >= self._batch.config.max_num_seqs:
            return WaitReason.SEATS
        if request.num_pending_tokens:
            return WaitReason.PENDING_TOKEN
        if not self._has_chunks and request.num_tokens > budget:
            return WaitReason.TOKEN_BUDGET
        return None if self._batch.allocate(request) else WaitReason.MEMORY
