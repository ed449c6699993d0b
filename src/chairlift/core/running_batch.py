"""The running batch and the plan of a step: what every batching policy does with requests and their memory."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field

from chairlift.config import SchedulerConfig
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand
from chairlift.core.kv.kv_groups import FULL, held_blocks
from chairlift.core.scheduling_policies import FCFSPolicy
from chairlift.core.wait_log import WaitLog
from chairlift.events import Step
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request, RequestStatus, WaitReason


@dataclass(slots=True)
class StepPlan:
    """What `schedule()` decided about one step.

    Attributes:
        output: the part that the executor receives.
        sampling: requests whose last known token is computed in this step.
        prefilled: requests whose last prompt token is computed in this step.
        num_computed: tokens with K and V before the step, parallel to `output.num_scheduled_tokens`.
        released_blocks: blocks that left the windows of their layers.
        wait_reason: why `head`, the head of the queue, is not in the step; None if the queue is empty.
        state: fields of the event that describe queue and memory after the schedule; None if no events are emitted.
    """

    output: SchedulerOutput
    scheduled_time: float
    sampling: list[Request] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    released_blocks: dict[str, list[int]] = field(default_factory=dict)
    num_computed: list[int] = field(default_factory=list)
    num_recomputed: int = 0
    wait_reason: WaitReason | None = None
    head: Request | None = None
    state: Mapping[str, int] | None = None

    def event(self, result: ModelRunnerOutput, finished: list[str], now: float) -> Step:
        """The event of the step, once its result is known."""
        assert self.state is not None, "the state is recorded if events are emitted"
        output = self.output
        scheduled, padding = output.num_scheduled_tokens, output.num_padding_tokens
        has_drafts = output.draft_token_ids or output.num_draft_tokens
        return Step(
            time=now,
            step=output.step,
            scheduled_time=self.scheduled_time,
            request_ids=list(scheduled),
            num_scheduled=list(scheduled.values()),
            num_computed=self.num_computed,
            num_new=[len(result.token_ids.get(request_id, ())) for request_id in scheduled],
            admitted=self.admitted,
            preempted=self.preempted,
            finished=finished,
            num_padding=[padding.get(request_id, 0) for request_id in scheduled] if padding else [],
            num_draft=[output.num_drafts(request_id) for request_id in scheduled] if has_drafts else [],
            num_recomputed=self.num_recomputed,
            new_blocks=_new_blocks(output),
            released_blocks=self.released_blocks,
            wait_reason=None if self.wait_reason is None else self.wait_reason.value,
            head_id=None if self.head is None else self.head.request_id,
            **self.state,
        )


def _new_blocks(output: SchedulerOutput) -> dict[str, list[int]]:
    """The blocks that each request receives in the step, in all groups of layers."""
    blocks = {new.request_id: held_blocks(new.block_ids) for new in output.new_requests}
    for request_id, added in output.new_block_ids.items():
        blocks[request_id] = blocks.get(request_id, []) + held_blocks(added)
    return blocks


class RunningBatch:
    """The running requests, and the queue behind them.

    Attributes:
        running: in the order that the scheduling policy gave when the step began.
        waiting: the queue.
        preempted: ids of requests whose preemption the next planned step reports.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, policy: FCFSPolicy, waits: WaitLog
    ) -> None:
        self.config = config
        self.kv = kv_cache_manager
        self.waiting = policy.make_queue()
        self.running: list[Request] = []
        self.preempted: list[str] = []
        self._policy = policy
        self._waits = waits
        self._num_groups = len(kv_cache_manager.windows)
        self._has_windows = kv_cache_manager.windows != FULL
        self._has_finished = False
        self._removed: list[str] = []
        self._released: dict[str, list[int]] = {}
        self._chunked: list[Request] = []
        self._blocked_at: tuple[Request, int] | None = None

    @property
    def num_running(self) -> int:
        return sum(not r.is_finished for r in self.running) if self._has_finished else len(self.running)

    @property
    def num_admissible(self) -> int:
        """Number of waiting requests that have a free seat."""
        return min(len(self.waiting), self.config.max_num_seqs - len(self.running))

    def enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waits.start(request)
        self.waiting.push(request)

    def charge_remote_service(self, service: Mapping[str, float]) -> None:
        """See `Scheduler.charge_remote_service`."""
        self._policy.record_remote_service(service)

    def begin_step(self, now: float) -> None:
        """Remove finished requests, and sort the others in the order of the scheduling policy.

        Release the blocks that left a window by a chunk of the last step.
        """
        self.drop_finished()
        for request in self._chunked:
            is_running = request.status is RequestStatus.RUNNING and request.finish_reason is None
            if is_running and (released := self.kv.release(request)):
                self._record_released(request, released, now)
        self._chunked.clear()
        if not self._policy.has_constant_keys:
            self.running.sort(key=self._policy.key)

    def drop_finished(self) -> None:
        """Remove finished requests from `running`."""
        if self._has_finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
            self._has_finished = False

    def end_step(self, plan: StepPlan) -> None:
        """Report the requests that were removed or preempted since the last planned step, and the released blocks."""
        plan.output.removed.extend(self._removed)
        self._removed.clear()
        plan.preempted.extend(self.preempted)
        self.preempted.clear()
        plan.released_blocks, self._released = self._released, {}
        self._policy.record_sampling(plan.sampling)

    def schedule_tokens(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """Schedule the tokens `start` to `start + count - 1`, whose slots are allocated."""
        end = request.num_computed_tokens = start + count
        request.write_moment += count * self._num_groups * plan.scheduled_time
        if start < request.recompute_until:
            plan.num_recomputed += request.count_recomputed(start, end)
        plan.output.num_scheduled_tokens[request.request_id] = count
        plan.num_computed.append(start)
        if start < request.num_prompt_tokens:
            # A kernel may write a single row while other rows of the step read, so such a block is not shared yet.
            if count > 1:
                self.kv.commit(request)
                if self._has_windows:
                    self._chunked.append(request)
            if end >= request.num_prompt_tokens:
                plan.prefilled.append(request)
        if end == request.num_tokens:
            request.num_tokens += 1
            request.num_pending_tokens += 1
            plan.sampling.append(request)

    def accept_drafts(self, request: Request, count: int, plan: StepPlan) -> None:
        """Record that `count` draft tokens of the step were accepted, so their K and V are those of output tokens."""
        request.num_computed_tokens += count
        request.write_moment += count * self._num_groups * plan.scheduled_time
        self._policy.record_sampling([request] * count)

    def allocate(self, request: Request) -> bool:
        """Allocate memory to the head of the queue; False if memory is short."""
        # Nothing was freed or cached since the last attempt, so it would fail again.
        if self._blocked_at == (request, self.kv.version):
            return False
        if self.kv.allocate(request):
            return True
        self._blocked_at = (request, self.kv.version)
        return False

    def admit(self, request: Request, plan: StepPlan) -> None:
        """Move the head of the queue, whose memory is allocated, into the batch."""
        now = plan.scheduled_time
        self.waiting.pop()
        self._waits.stop(request)
        request.status = RequestStatus.RUNNING
        request.start_holding(self.kv.num_written_slots(request), now)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
        if self._policy.has_constant_keys:
            insort(self.running, request, key=self._policy.key)
        else:
            self.running.append(request)
        self._policy.record_admission(request)
        plan.admitted.append(request.request_id)
        tables = [list(block_ids) for block_ids in self.kv.block_tables(request)]
        plan.output.new_requests.append(request.new_request(tables))

    def block_queue(
        self, head: Request, reason: WaitReason, plan: StepPlan, demand: MemoryDemand | None = None
    ) -> None:
        """Record why the head of the queue is not in this step; `demand` as in `WaitLog.record_reason`."""
        plan.wait_reason = reason
        plan.head = head
        self._waits.record_head(head, reason, plan.scheduled_time, len(self.running), demand)

    def grow(self, request: Request, num_slots: int, plan: StepPlan) -> bool:
        """Extend the request's memory to `num_slots` tokens; False if memory is short."""
        change = self.kv.grow(request, num_slots)
        if change is None:
            return False
        num_added = len(change.added[0]) if self._num_groups == 1 else sum(map(len, change.added))
        request.hold_moment += num_added * self.kv.block_size * plan.scheduled_time
        if change.released:
            self._record_released(request, change.released, plan.scheduled_time)
        plan.output.new_block_ids[request.request_id] = change.added
        return True

    def _record_released(self, request: Request, block_ids: list[int], now: float) -> None:
        """Record that the request has released blocks that left a window."""
        moment = len(block_ids) * self.kv.block_size * now
        request.hold_moment -= moment
        request.write_moment -= moment
        self._released.setdefault(request.request_id, []).extend(block_ids)

    def preempt_last(self, plan: StepPlan) -> Request:
        """Preempt the running request with the largest key; its tokens are recomputed when it resumes."""
        victim = self.running.pop()
        victim.recompute_until = max(victim.recompute_until, victim.num_computed_tokens)
        self._free_memory(victim, plan.scheduled_time)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.preempted.append(victim.request_id)
        self.enqueue(victim)
        return victim

    def remove(self, request: Request, now: float) -> None:
        """Free the memory of a running request that has finished."""
        self._free_memory(request, now)
        self._has_finished = True

    def _free_memory(self, request: Request, now: float) -> None:
        request.stop_holding(self.kv.num_written_slots(request), now)
        self.kv.free(request)
        self._released.pop(request.request_id, None)
        self._removed.append(request.request_id)
