"""The running batch, and the mechanics of a step that every way of batching shares."""

from __future__ import annotations

from bisect import insort

from chairlift.config import SchedulerConfig
from chairlift.core.kv_cache_manager import KVCacheManager, MemoryDemand
from chairlift.core.request_queue import SchedulingPolicy
from chairlift.core.step_plan import StepPlan
from chairlift.core.wait_log import WaitLog
from chairlift.outputs import NewRequest
from chairlift.request import Request, RequestStatus, WaitReason


class Batch:
    """Who runs, who was removed since the last step, and the queue behind them.

    `running` is in the policy's order, as it was when the step began; `preempted` are told with the next step that
    computes anything.
    """

    def __init__(
        self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, policy: SchedulingPolicy, waits: WaitLog
    ) -> None:
        self.config = config
        self.kv = kv_cache_manager
        self.waiting = policy.make_queue()
        self.running: list[Request] = []
        self._policy = policy
        self._waits = waits
        self._is_stale = False
        self._removed: list[str] = []
        self.preempted: list[str] = []
        self._refused_at: tuple[Request, int] | None = None

    @property
    def num_running(self) -> int:
        return len(self.running) if not self._is_stale else sum(not r.is_finished for r in self.running)

    @property
    def num_newcomers(self) -> int:
        """Waiting requests for which there is a seat."""
        return min(len(self.waiting), self.config.max_num_seqs - len(self.running))

    def enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waits.join(request)
        self.waiting.push(request)

    # -- a step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Who finished leaves, and who stays stands in the policy's order."""
        self.drop_finished()
        if not self._policy.is_constant:
            self.running.sort(key=self._policy.key)

    def drop_finished(self) -> None:
        """Requests that finished leave their seats."""
        if self._is_stale:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
            self._is_stale = False

    def end_step(self, plan: StepPlan) -> None:
        """The executor learns with this plan who is gone."""
        plan.output.removed.extend(self._removed)
        self._removed.clear()
        plan.preempted.extend(self.preempted)
        self.preempted.clear()
        self._policy.note_sampling(plan.sampling)

    def schedule_tokens(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        """Compute tokens start to start + count, which have their slots."""
        end = start + count
        request.num_computed_tokens = end
        request.write_moment += count * plan.scheduled_time
        plan.output.num_scheduled_tokens[request.request_id] = count
        plan.num_computed.append(start)
        if start < request.recompute_until:
            again = min(end, request.recompute_until) - start
            request.num_recomputed_tokens += again
            plan.num_recomputed += again
        if start < request.num_prompt_tokens:
            if count > 1:  # what one row alone computes is written while other rows of the step read
                self.kv.commit(request)
            if end >= request.num_prompt_tokens:
                plan.prefilled.append(request)
        if end == request.num_tokens:
            request.num_tokens += 1
            request.num_pending_tokens += 1
            plan.sampling.append(request)

    def admit(self, request: Request) -> bool:
        """Whether the request got its memory; False if it cannot have it now."""
        # Nothing was freed or cached since it was last refused: the answer would be the same.
        if self._refused_at == (request, self.kv.version):
            return False
        if self.kv.admit(request):
            return True
        self._refused_at = (request, self.kv.version)
        return False

    def introduce(self, request: Request, plan: StepPlan) -> None:
        """The head of the queue, which holds its memory, takes a seat."""
        now = plan.scheduled_time
        self.waiting.pop()
        self._waits.leave(request)
        request.status = RequestStatus.RUNNING
        request.hold_moment = request.num_slots * now
        request.write_moment = request.num_computed_tokens * now
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
        if self._policy.is_constant:
            insort(self.running, request, key=self._policy.key)
        else:
            self.running.append(request)
        self._policy.note_admitted(request)
        plan.admitted.append(request.request_id)
        plan.output.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=list(self.kv.block_ids(request)),
                sampling_params=request.sampling_params,
                seed=request.seed,
                stop_token_ids=sorted(request.stop_token_ids),
            )
        )

    def refuse(self, request: Request, reason: WaitReason, plan: StepPlan, demand: MemoryDemand | None = None) -> None:
        """The head of the queue is not admitted in this step; `demand`: see `WaitLog.note`."""
        plan.wait_reason = reason
        plan.head = request
        self._waits.note_head(request, reason, plan.scheduled_time, len(self.running), demand)

    def grow(self, request: Request, num_slots: int, plan: StepPlan) -> bool:
        """Extend the request's memory; False if it cannot be had."""
        block_ids = self.kv.grow(request, num_slots)
        if block_ids is None:
            return False
        request.hold_moment += len(block_ids) * self.kv.block_size * plan.scheduled_time
        plan.output.new_block_ids[request.request_id] = block_ids
        return True

    def preempt_last(self, plan: StepPlan) -> Request:
        """Throw out the running request with the largest key, to be computed again later."""
        victim = self.running.pop()
        victim.recompute_until = max(victim.recompute_until, victim.num_computed_tokens)
        self._take_memory(victim, plan.scheduled_time)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.preempted.append(victim.request_id)
        self.enqueue(victim)
        return victim

    def remove(self, request: Request, now: float) -> None:
        """A running request is gone for good."""
        self._take_memory(request, now)
        self._is_stale = True

    def _take_memory(self, request: Request, now: float) -> None:
        used_until = now if request.done_time is None else request.done_time
        request.kv_slot_seconds_held += request.num_slots * now - request.hold_moment
        request.kv_slot_seconds_used += request.num_computed_tokens * used_until - request.write_moment
        self.kv.free(request)
        self._removed.append(request.request_id)
