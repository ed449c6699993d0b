"""Continuous batching: the batch of running requests is chosen anew at every step.

    queue:  [ f e d ]  --admit-->  running:  [ a b c ]        a, b decode: 1 token each
                ^                                 |           c has a long prompt: the next chunk of it
                +----------- preempt_last --------+           d joins if seats, tokens and memory are left

A step computes some tokens of each running request, within the token budget `max_num_batched_tokens`. A seat is one of
the `max_num_seqs` places in the batch. The key of a request gives its place in queue and batch: under fcfs its arrival
index, so that a preempted request returns to the front of the queue.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from dataclasses import dataclass, field
from typing import Any

from chairlift.config import SchedulerConfig
from chairlift.core.backfilling import Backfilling
from chairlift.core.chunk_allowance import ChunkAllowance
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.queues.queue_selection import make_queue
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request, RequestStatus, WaitReason


@dataclass(slots=True)
class NextStep:
    """What `Scheduler.schedule` decided about one step.

    Attributes:
        output: the part that the executor receives.
        time: when the step is scheduled, in seconds of the engine's clock.
        requests: the scheduled requests, parallel to `output.num_scheduled_tokens`.
        sampling: requests of which this step computes the last token, pending or not, so their next token is sampled.
        prefilled: requests whose last prompt token is computed in this step.
    """

    output: SchedulerOutput
    time: float
    requests: list[Request] = field(default_factory=list)
    sampling: list[Request] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)


class RunningBatch(ABC):
    """The running requests with the queue behind them, and what any batching policy does with them.

    Only batches write `num_computed_tokens`.

    Attributes:
        running: in the order that the scheduling policy gave when the step began.
        waiting: the queue, which also has the scheduling policy.
        groups: the beam searches (`BeamGroup`) of unfinished requests, each of which is one unit of queue and batch.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, observer: SchedulerObserver) -> None:
        self._config = config
        self._kv = kv_cache_manager
        self._observer = observer
        self.waiting = make_queue(config, kv_cache_manager.num_cached_tokens)
        self.running: list[Request] = []
        self.groups: list[Any] = []
        self._has_finished, self.num_joining = False, 0
        self._removed: list[str] = []
        self._blocked_at: tuple[Request, int] | None = None
        self._blocked_steps: dict[Request, int] = {}

    @abstractmethod
    def fill(self, plan: NextStep) -> None:
        """Schedule running requests and admit waiting ones, within the limits of the configuration."""

    @property
    def num_running(self) -> int:
        return sum(not r.is_finished for r in self.running) if self._has_finished else len(self.running)

    # -- the frame of a step -------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> None:
        """Remove finished requests, and sort the others in the order of the scheduling policy."""
        self.drop_finished()
        self.waiting.begin_step(now)
        for request, change in self._kv.begin_step(now):
            self._observer.record_table_change(request, change, now)
        if not self.waiting.has_constant_keys:
            self.running.sort(key=self.waiting.key)
            for group in self.groups:
                group.gather(self.running)

    def end_step(self, plan: NextStep) -> None:
        """Add to the plan what was removed and preempted since the last one, and what KV memory copies and keeps."""
        plan.output.removed.extend(self._removed)
        self._removed.clear()
        self._kv.plan_step(plan.output, plan.requests)
        self.waiting.record_sampling(plan.sampling)

    def drop_finished(self) -> None:
        """Remove finished requests from `running`."""
        if self._has_finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
            self._has_finished = False

    # -- requests ------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request, now: float) -> bool:
        """Add a request to the queue; False if it is a beam that waits for its leader instead."""
        request.status = RequestStatus.WAITING
        self._observer.record_queued(request, now)
        if request.group is not None and not request.group.enqueue(request):
            return False
        self.waiting.push(request)
        self._kv.prefixes.expect(request)
        return True

    def allocate_head(self, request: Request) -> bool:
        """Allocate memory to the head of the queue; False if memory is short. A shared prefix counts as computed."""
        # Nothing was freed or cached since the last attempt, so it would fail again.
        if self._blocked_at == (request, self._kv.version) or (num_computed := self._kv.allocate(request)) is None:
            self._blocked_at = (request, self._kv.version)
            return False
        request.num_computed_tokens = num_computed
        return True

    def admit(self, request: Request, plan: NextStep) -> None:
        """Add a request, whose memory is allocated, to the batch."""
        request.status = RequestStatus.RUNNING
        self._observer.record_admission(request, plan.time)
        if self.waiting.has_constant_keys:
            insort(self.running, request, key=self.waiting.key)
        else:
            self.running.append(request)
        self.waiting.record_admission(request)
        tables = [list(block_ids) for block_ids in self._kv.block_tables(request)]
        plan.output.new_requests.append(request.new_request(tables, self._kv.prefixes.checkpoint(request)))

    def grow(self, request: Request, num_slots: int, plan: NextStep) -> bool:
        """Extend the request's memory to `num_slots` tokens; False if memory is short."""
        change = self._kv.grow(request, num_slots)
        if change is None:
            return False
        self._observer.record_table_change(request, change, plan.time)
        plan.output.new_block_ids[request.request_id] = change.added
        return True

    def schedule_tokens(self, request: Request, start: int, count: int, plan: NextStep) -> None:
        """Schedule the tokens `start` to `start + count - 1`, whose slots are allocated."""
        end = request.num_computed_tokens = start + count
        plan.output.num_scheduled_tokens[request.request_id] = count
        plan.requests.append(request)
        if start < request.num_prompt_tokens:
            # A request that is admitted later in this step may share these blocks, because the rows of a chunk are
            # written before any row reads. A single row is not: its block is committed when the request grows or ends.
            if count > 1:
                self._kv.commit(request)
            if end >= request.num_prompt_tokens:
                plan.prefilled.append(request)
        if end == request.num_tokens:
            request.num_tokens += 1
            plan.sampling.append(request)

    def accept_drafts(self, request: Request, count: int, plan: NextStep) -> None:
        """Record that `count` draft tokens of the step were accepted, so their K and V belong to output tokens."""
        request.num_computed_tokens += count
        self._observer.record_accepted_drafts(request, count, plan.time)
        self.waiting.record_accepted_drafts(request, count)

    def preempt_last(self, plan: NextStep, displacing: Request | None = None) -> Request:
        """Preempt the running request with the largest key: memory is short, or a waiting request displaces it.

        It keeps its tokens and returns to the queue. When it is admitted again, it recomputes those whose K and V are
        neither in the swap space nor cached. A token of an earlier step still arrives, and is appended. All beams of a
        search are preempted, and their leader is returned.
        """
        victim = self.running.pop()
        is_swapped = self._kv.swap_out(victim)
        self._observer.record_preemption(victim, is_swapped, displacing, plan.time)
        self._kv.free(victim)  # before its progress is reset, because it commits the computed blocks
        self._removed.append(victim.request_id)
        if not is_swapped:
            victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        is_queued = self.enqueue(victim, plan.time)
        return victim if is_queued else self.preempt_last(plan, displacing)

    def remove(self, request: Request) -> None:
        """Free the memory of a running request that has finished."""
        self._kv.free(request)
        self._removed.append(request.request_id)
        self._has_finished = True


class ContinuousBatching(RunningBatch):
    """Iteration-level scheduling (Orca; Yu et al., OSDI'22, section 3.1): running requests first, then waiting ones,
    within the token budget and `max_num_seqs`. Prompts are computed in chunks (Sarathi-Serve; Agrawal et al., OSDI'24,
    section 4). When memory is short, the running request with the largest key is preempted (Kwon et al., SOSP'23,
    section 4.5). It comes after all requests already scheduled in the step, so no scheduled token is taken back.
    """

    def fill(self, plan: NextStep) -> None:
        if (head := self.waiting.displacing_head(self.running, self._kv, self._config.max_num_seqs)) is not None:
            self.preempt_last(plan, displacing=head)
        chunks = ChunkAllowance(self.waiting.step_time, self.running, self.waiting.keeps_tpot)
        budget, has_preempted = self._schedule_running(plan, chunks)
        self._schedule_waiting(plan, budget, chunks, may_admit=not has_preempted)

    def _schedule_running(self, plan: NextStep, chunks: ChunkAllowance) -> tuple[int, bool]:
        """Schedule the uncomputed tokens of every running request; returns the rest of the token budget, and whether a
        request was preempted.

        A chunk leaves one token of the budget to every request behind it and to every waiting request for which a seat
        is free, so a decode never stalls behind a prompt and a free seat is taken in the next step. There is always
        room for that, because max_num_batched_tokens >= max_num_seqs. The estimated time of a step may allow less, but
        `chunks.take` returns at least 1.
        """
        running = self.running  # becomes shorter when a request is preempted
        budget = self._config.max_num_batched_tokens
        num_waiting, num_admissible = len(self.waiting), min(len(self.waiting), self.num_free_seats)
        self.num_joining = sum(group.num_reserved_seats for group in self.groups if group.is_started)
        index = 0
        while index < len(running):
            request = running[index]
            index += 1
            if request.group is not None and not request.group.prepare(request, plan):
                break
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if count > 1:
                count = chunks.take(
                    start, min(count, budget - num_admissible - self.num_joining - len(running) + index)
                )
            elif not count or request.num_tokens == request.end_total_tokens:
                continue  # only the last token of the output is left, which is never computed
            if start + count > request.num_slots and not self._grow_or_preempt(request, start + count, plan):
                break
            self.schedule_tokens(request, start, count, plan)
            budget -= count
        return budget, len(self.waiting) > num_waiting

    def _grow_or_preempt(self, request: Request, num_slots: int, plan: NextStep) -> bool:
        """Extend the request's memory, preempting from the end of the batch; False if it preempted the request."""
        while not self.grow(request, num_slots, plan):
            if self.preempt_last(plan) is request:
                return False
        return True

    def _schedule_waiting(self, plan: NextStep, budget: int, chunks: ChunkAllowance, may_admit: bool) -> None:
        """Admit from the head of the queue while there are seats, tokens and memory; then those that may pass it."""
        backfilling = Backfilling(self, self._config, self._kv, self._blocked_steps)
        for request in backfilling.candidates():
            reason = self._try_to_allocate(request, budget) if may_admit else WaitReason.PREEMPTION
            if reason is not None:
                if backfilling.block(request, reason):
                    self._observer.record_blocked(request, reason, plan.time)
                continue
            self.admit(self.waiting.take(request), plan)
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if self._config.enable_chunked_prefill:
                count = chunks.take(start, min(count, budget - min(len(self.waiting), self.num_free_seats)))
            if start + count > request.num_slots:  # only with sliding windows, whose blocks are taken chunk by chunk
                has_grown = self.grow(request, start + count, plan)
                assert has_grown, "admission has checked that blocks are free for the windows"
            self.schedule_tokens(request, start, count, plan)
            budget -= count

    def _try_to_allocate(self, request: Request, budget: int) -> WaitReason | None:
        """Allocate the memory of a waiting request, within the token budget; returns why it must wait, if so."""
        if request.num_seats > self.num_free_seats:
            return WaitReason.SEATS
        if request.num_pending_tokens:
            return WaitReason.PENDING_TOKEN
        if not self._config.enable_chunked_prefill and request.num_tokens > budget:
            return WaitReason.TOKEN_BUDGET
        is_short = request.group is not None and request.group.lacks_memory
        return WaitReason.MEMORY if is_short or not self.allocate_head(request) else None

    @property
    def num_free_seats(self) -> int:
        num_reserved: int = sum(group.num_reserved_seats for group in self.groups)
        return self._config.max_num_seqs - len(self.running) - num_reserved
