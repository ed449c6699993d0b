"""The scheduler: which request gets how many tokens in the next step.

    add --> PARKED ----> WAITING --admit--> RUNNING --stop, length--> FINISHED
              siblings      ^                  |
                            +----preempted-----+      abort: from anywhere, at once

`schedule` advances `num_computed_tokens`; `update` brings the sampled tokens. Several schedules may be ahead of their
updates: a token on its way counts in `num_tokens`, its value is the device's business.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from chairlift.config import SchedulerConfig
from chairlift.core import step_plan
from chairlift.core.kv_cache_manager import KVCacheManager
from chairlift.core.request_queue import RequestQueue, scheduling_policy
from chairlift.core.siblings import SiblingGate
from chairlift.core.step_plan import StepPlan
from chairlift.errors import RequestError
from chairlift.events import EventSink, RequestRefused
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, NewRequest, RequestTimes, SchedulerOutput
from chairlift.request import FinishReason, Request, RequestStatus, WaitReason


class Scheduler:
    """Iteration-level scheduling (Orca; Yu et al., OSDI'22, section 3.1) over chunked prefills
    (Sarathi-Serve; Agrawal et al., OSDI'24, section 4): running requests first, then waiting ones, within
    `max_num_batched_tokens` tokens and `max_num_seqs` seats. When memory is short, the running request with the
    largest key is preempted and recomputed later (Kwon et al., SOSP'23, section 4.5).

    `running` is kept in the policy's order, so whoever is preempted stands behind everyone already scheduled in the
    step, and nothing is ever taken back.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, events: EventSink | None = None):
        self._config = config
        self._kv = kv_cache_manager
        self._events = events
        self._policy = scheduling_policy(config.scheduling_policy)
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(self._policy)
        self._siblings = SiblingGate()
        self._running: list[Request] = []
        self._running_is_stale = False
        self._removed: list[str] = []
        self._preempted: list[str] = []
        self._refused_at: tuple[Request, int] | None = None
        self._in_flight: deque[StepPlan] = deque()
        self._num_arrived = 0
        self._step = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running) if not self._running_is_stale else sum(not r.is_finished for r in self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and siblings parked behind their leader."""
        return len(self._waiting) + len(self._siblings)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def is_idle(self) -> bool:
        """Nothing is unfinished, and every block is free."""
        return not self._requests and self._kv.num_free_blocks == self._kv.num_blocks

    def get(self, request_id: str) -> Request | None:
        """An unfinished request."""
        return self._requests.get(request_id)

    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: Request) -> None:
        """Queue a request, or park it while its leader's prompt is being computed.

        Raises:
            RequestError: the id is in use, or the request could not run even alone (with the arithmetic).
        """
        try:
            self._check(request)
        except RequestError as error:
            if self._events is not None:
                self._events.emit(RequestRefused(request.arrival_time, request.request_id, str(error)))
            raise
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        if self._events is not None:
            self._events.emit(step_plan.arrived(request))
        leader = self._requests.get(request.leader_id) if request.leader_id is not None else None
        if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens:
            self._siblings.park(request, leader.request_id)
            self._note_wait(request, WaitReason.SIBLING_PREFILL, request.arrival_time)
        else:
            self._enqueue(request)

    def _check(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use by an unfinished request", "request_id")
        if request.max_total_tokens > self._config.max_model_len:
            raise RequestError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} output tokens exceed "
                f"max_model_len={self._config.max_model_len}",
                "max_tokens",
            )
        self._kv.check_fits(request)

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at once, wherever it is; False if there is no such unfinished request."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, reason, now)
        return True

    def _enqueue(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._waiting.push(request)

    def _release_siblings(self, leader: Request) -> None:
        for sibling in self._siblings.release(leader):
            self._enqueue(sibling)

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        status, request.status = request.status, RequestStatus.FINISHED
        request.finish_reason = reason
        if status is RequestStatus.RUNNING:
            self._kv.free(request)
            self._removed.append(request.request_id)
            self._running_is_stale = True
        elif status is RequestStatus.WAITING:
            self._waiting.discard()
        else:
            self._siblings.discard(request)
        self._kv.forget(request)
        del self._requests[request.request_id]
        if self._events is not None:
            self._events.emit(step_plan.finished(request, now))
        if request in self._siblings:
            self._release_siblings(request)

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step and advance `num_computed_tokens`; None if there is nothing to compute now."""
        if self._running_is_stale:
            self._drop_finished()
        plan = StepPlan(SchedulerOutput(self._step, {}), now)
        num_preempted = len(self._preempted)
        budget = self._schedule_running(plan)
        self._schedule_waiting(plan, budget, now, may_admit=len(self._preempted) == num_preempted)
        for leader in plan.prefilled_leaders:
            self._release_siblings(leader)
        if not plan.output.num_scheduled_tokens:
            return None
        plan.output.removed.extend(self._removed)
        self._removed.clear()
        plan.preempted.extend(self._preempted)
        self._preempted.clear()
        self._step += 1
        self._in_flight.append(plan)
        if self._events is not None:
            self._sample_state(plan)
        return plan.output

    def _schedule_running(self, plan: StepPlan) -> int:
        """Give every running request what it lacks; returns what is left of the token budget.

        A chunk leaves one token to everyone behind it, and to everyone who waits for a seat that is free: a decode
        never stalls behind a prompt, and a freed seat is taken in the next step. That is always possible, because
        max_num_batched_tokens >= max_num_seqs.
        """
        budget = self._config.max_num_batched_tokens
        newcomers = self._num_newcomers()
        index = 0
        while index < len(self._running):
            request = self._running[index]
            index += 1
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if count > 1:
                count = min(count, budget - newcomers - (len(self._running) - index))
            elif not count or request.num_tokens == request.end_total_tokens:
                continue
            if start + count > request.num_slots and not self._grow(request, start + count, plan):
                break
            self._schedule_tokens(request, start, count, plan)
            budget -= count
        return budget

    def _schedule_tokens(self, request: Request, start: int, count: int, plan: StepPlan) -> None:
        end = start + count
        request.num_computed_tokens = end
        plan.output.num_scheduled_tokens[request.request_id] = count
        if start < request.num_prompt_tokens:
            self._kv.commit(request)
            if end >= request.num_prompt_tokens and request in self._siblings:
                plan.prefilled_leaders.append(request)
        if end == request.num_tokens:
            request.num_tokens += 1
            request.num_pending_tokens += 1
            plan.sampling.append(request)
        if self._events is not None:
            plan.num_computed.append(start)

    def _grow(self, request: Request, num_slots: int, plan: StepPlan) -> bool:
        """Extend the request's memory, preempting from the end of the batch; False if that took the request itself."""
        while (block_ids := self._kv.grow(request, num_slots)) is None:
            victim = self._running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        plan.output.new_block_ids[request.request_id] = block_ids
        return True

    def _preempt(self, request: Request) -> None:
        self._kv.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._removed.append(request.request_id)
        self._preempted.append(request.request_id)
        self._enqueue(request)

    def _schedule_waiting(self, plan: StepPlan, budget: int, now: float, may_admit: bool) -> None:
        """Admit from the head of the queue while there are seats, tokens and memory."""
        while (request := self._waiting.peek()) is not None:
            reason = self._refusal(request) if may_admit else WaitReason.PREEMPTION
            if reason is not None:
                self._note_wait(request, reason, now)
                return
            self._waiting.pop()
            self._introduce(request, plan, now)
            start = request.num_computed_tokens
            count = min(request.num_tokens - start, budget - self._num_newcomers())
            self._schedule_tokens(request, start, count, plan)
            budget -= count

    def _num_newcomers(self) -> int:
        """Waiting requests for which there is a seat."""
        return min(len(self._waiting), self._config.max_num_seqs - len(self._running))

    def _refusal(self, request: Request) -> WaitReason | None:
        """Why the head of the queue is not admitted; None if it was, and then it holds its memory."""
        if len(self._running) >= self._config.max_num_seqs:
            return WaitReason.SEATS
        if request.num_pending_tokens:
            return WaitReason.PENDING_TOKEN
        # Nothing was freed or cached since it was last refused: the answer would be the same.
        if self._refused_at == (request, self._kv.version):
            return WaitReason.MEMORY
        if not self._kv.admit(request):
            self._refused_at = (request, self._kv.version)
            return WaitReason.MEMORY
        return None

    def _introduce(self, request: Request, plan: StepPlan, now: float) -> None:
        request.status = RequestStatus.RUNNING
        request.wait_reason = None
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
            request.num_cached_tokens = request.num_computed_tokens
        insort(self._running, request, key=self._policy.key)
        plan.admitted.append(request.request_id)
        plan.output.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=list(self._kv.block_ids(request)),
                sampling_params=request.sampling_params,
                seed=request.seed,
                stop_token_ids=sorted(request.stop_token_ids),
            )
        )

    def _drop_finished(self) -> None:
        self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        self._running_is_stale = False

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, result: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Take in the oldest step's tokens; returns what is new for each request that got some, or ended."""
        plan = self._in_flight.popleft()
        assert plan.output.step == result.step, "steps are answered in their order"
        outputs: list[EngineCoreOutput] = []
        finished: list[str] = []
        for request in plan.sampling:
            if request.status is RequestStatus.FINISHED:
                continue
            output = self._append(request, result, now)
            if output.finish_reason is not None:
                finished.append(request.request_id)
            outputs.append(output)
        if result.prompt_logprobs:
            outputs = _with_prompt_logprobs(outputs, result, self._requests.keys() | set(finished))
        if self._running_is_stale:
            self._drop_finished()
        if self._events is not None:
            self._events.emit(plan.event(result, finished, now))
        return outputs

    def _append(self, request: Request, result: ModelRunnerOutput, now: float) -> EngineCoreOutput:
        request_id = request.request_id
        tokens = result.token_ids[request_id]
        if len(tokens) > 1 or tokens[0] in request.stop_token_ids:
            tokens = _until_stop(request, tokens)
        request.token_ids += tokens
        request.num_pending_tokens -= 1
        request.num_tokens = len(request.token_ids) + request.num_pending_tokens
        logprobs = result.logprobs[request_id][: len(tokens)] if request_id in result.logprobs else None
        output = EngineCoreOutput(request_id, tokens, logprobs=logprobs, num_preemptions=request.num_preemptions)
        if request.first_token_time is None:
            request.first_token_time = now
            output = output._replace(num_cached_tokens=request.num_cached_tokens, times=_times(request))
        if request.stop_token_id is not None:
            reason = FinishReason.STOP
        elif len(request.token_ids) == request.end_total_tokens:
            reason = FinishReason.LENGTH
        else:
            return output
        self._finish(request, reason, now)
        return output._replace(
            finish_reason=reason.value, stop_token_id=request.stop_token_id, times=_times(request, finished=now)
        )

    # -- why, and what happened ----------------------------------------------------------------------------------

    def _note_wait(self, request: Request, reason: WaitReason, now: float) -> None:
        if request.wait_reason is reason:
            return
        request.wait_reason = reason
        if self._events is not None:
            demand = self._kv.demand(request)
            self._events.emit(step_plan.waiting(request, reason, demand, len(self._running), now))

    def _sample_state(self, plan: StepPlan) -> None:
        plan.num_running = len(self._running)
        plan.num_waiting = self.num_waiting
        plan.free_blocks = self._kv.num_free_blocks
        plan.evictable_blocks = self._kv.num_evictable_blocks


def _until_stop(request: Request, tokens: list[int]) -> list[int]:
    """The tokens up to the first stop token (kept) or the length limit; notes the stop token in the request."""
    tokens = tokens[: request.end_total_tokens - len(request.token_ids)]
    for index, token in enumerate(tokens):
        if token in request.stop_token_ids:
            request.stop_token_id = token
            return tokens[: index + 1]
    return tokens


def _with_prompt_logprobs(
    outputs: list[EngineCoreOutput], result: ModelRunnerOutput, known: set[str]
) -> list[EngineCoreOutput]:
    """Attach prompt logprobs, with an output of its own where a chunk did not sample."""
    pending = {rid: entry for rid, entry in result.prompt_logprobs.items() if rid in known}
    outputs = [o._replace(prompt_logprobs=pending.pop(o.request_id, None)) for o in outputs]
    return outputs + [EngineCoreOutput(rid, [], prompt_logprobs=entry) for rid, entry in pending.items()]


def _times(request: Request, finished: float | None = None) -> RequestTimes:
    return RequestTimes(request.arrival_time, request.first_scheduled_time, request.first_token_time, finished)
