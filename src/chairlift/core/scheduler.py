"""The scheduler: which request gets how many tokens in the next step.

    add --> PARKED ----> WAITING --admit--> RUNNING --stop, length--> FINISHED
              siblings      ^                  |
                            +----preempted-----+      abort: from anywhere, at once

`schedule` advances `num_computed_tokens`; `update` brings the sampled tokens. Several schedules may be ahead of their
updates: a token on its way counts in `num_tokens`, its value is the device's business.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from chairlift.config import SchedulerConfig
from chairlift.core import step_plan
from chairlift.core.accounting import account
from chairlift.core.batch import Batch
from chairlift.core.batching import make_batching
from chairlift.core.held_outputs import HeldOutputs
from chairlift.core.kv_cache_manager import KVCacheManager
from chairlift.core.scheduling_policies import make_scheduling_policy
from chairlift.core.siblings import SiblingGate
from chairlift.core.step_plan import StepPlan
from chairlift.core.wait_log import WaitLog
from chairlift.errors import RequestError
from chairlift.events import EventSink, RequestRefused
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, RequestStats, RequestTimes, SchedulerOutput
from chairlift.request import FinishReason, Request, RequestStatus, WaitReason


class Scheduler:
    """Iteration-level scheduling: who is in the batch is decided at every step, by the rules of `batching`.

    A member of a closed batch that has ended stays in `running` with its memory until the batch is over; nothing is
    told of any member before.
    """

    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager, events: EventSink | None = None):
        self._config = config
        self._kv = kv_cache_manager
        self._events = events
        self._requests: dict[str, Request] = {}
        self._siblings = SiblingGate()
        self._waits = WaitLog(kv_cache_manager, events, has_turns=config.scheduling_policy == "fair")
        self._batch = Batch(config, kv_cache_manager, make_scheduling_policy(config), self._waits)
        self._batching = make_batching(self._batch)
        self._held = HeldOutputs()
        self._outbox: list[EngineCoreOutput] = []
        self._in_flight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, str]] = []
        self._num_arrived = 0
        self._step = 0

    # -- requests come and go ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and siblings parked behind their leader."""
        return len(self._batch.waiting) + len(self._siblings)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._outbox)

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
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.request_id))
        if self._events is not None:
            self._events.emit(step_plan.arrived(request, self._step))
        leader = self._requests.get(request.leader_id) if request.leader_id is not None else None
        if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens:
            self._siblings.park(request, leader.request_id)
            self._waits.park(request)
            self._waits.note(request, WaitReason.SIBLING_PREFILL, request.arrival_time, self.num_running)
        else:
            self._batch.enqueue(request)

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
        self._batching.accept(request)

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at once, wherever it is; False if there is no such unfinished request.

        A member of a closed batch gives no more output, and its seat and its memory when the batch is over.
        """
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        self._end(request, reason, now)
        if self._batching.is_over and not self._in_flight:
            self._outbox += self._disband(now)
        return True

    def expire(self, now: float) -> None:
        """End the requests whose deadline has passed; `take_outbox` tells of them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None or request.deadline is None or request.deadline > now:
                continue
            if self.abort(request_id, now, FinishReason.TIMEOUT):
                self._outbox.append(step_plan.timed_out(request))

    @property
    def has_outbox(self) -> bool:
        return bool(self._outbox)

    def take_outbox(self) -> list[EngineCoreOutput]:
        """What is to be told without a step: whose deadline has passed, and members of a closed batch whose last
        companion was aborted."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def _end(self, request: Request, reason: FinishReason, now: float) -> None:
        request.finish_reason = reason
        if self._batching.is_closed and request.status is RequestStatus.RUNNING:
            request.done_time = now
        else:
            self._leave(request, now)

    def _leave(self, request: Request, now: float) -> None:
        status, request.status = request.status, RequestStatus.FINISHED
        if status is RequestStatus.RUNNING:
            self._batch.remove(request, now)
        elif status is RequestStatus.WAITING:
            self._batch.waiting.discard(request)
            self._waits.leave(request)
        else:
            self._siblings.discard(request)
            self._waits.unpark(request)
        self._kv.forget(request)
        del self._requests[request.request_id]
        if self._events is not None:
            self._events.emit(step_plan.finished(request, now, self._step))
        if request in self._siblings:
            self._release_siblings(request, now)

    def _disband(self, now: float) -> list[EngineCoreOutput]:
        """The closed batch is over: everybody leaves, and is told all at once; aborted members never got a token."""
        outputs = []
        for member in list(self._batch.running):
            held = self._held.release(member.request_id)
            if member.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                member.first_token_time = now
                self._leave(member, now)
                outputs.append(_last(held, member, now))
            else:
                member.first_token_time = None
                self._leave(member, now)
        self._batch.drop_finished()
        return outputs

    def _release_siblings(self, leader: Request, now: float) -> None:
        for sibling in self._siblings.release(leader):
            self._waits.release(sibling, now)
            self._batch.enqueue(sibling)

    # -- schedule ------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step and advance `num_computed_tokens`; None if there is nothing to compute now."""
        self._batch.begin_step()
        plan = StepPlan(SchedulerOutput(self._step, {}), now)
        self._batching.fill(plan)
        if not plan.output.num_scheduled_tokens:
            return None
        self._batch.end_step(plan)
        self._waits.count_step(plan.wait_reason, plan.head)
        for request in plan.prefilled:
            if request in self._siblings:
                self._release_siblings(request, now)
        self._step += 1
        self._in_flight.append(plan)
        if self._events is not None:
            self._sample_state(plan)
        return plan.output

    def _sample_state(self, plan: StepPlan) -> None:
        plan.num_running = len(self._batch.running)
        plan.num_waiting = self.num_waiting
        plan.free_blocks = self._kv.num_free_blocks
        plan.evictable_blocks = self._kv.num_evictable_blocks
        plan.memory = account(self._batch.running, self._kv, plan.wait_reason)

    # -- update --------------------------------------------------------------------------------------------------

    def update(self, result: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Take in the oldest step's tokens; returns what is new for each request that got some, or ended."""
        plan = self._in_flight.popleft()
        assert plan.output.step == result.step, "steps are answered in their order"
        outputs: list[EngineCoreOutput] = []
        finished: list[str] = []
        for request in plan.sampling:
            if request.finish_reason is not None:
                continue
            if result.errors and request.request_id in result.errors:
                output = self._fail(request, result.errors[request.request_id], now)
            else:
                output = self._append(request, result, now)
            if output.finish_reason is not None:
                finished.append(request.request_id)
            outputs.append(output)
        if result.prompt_logprobs:
            outputs = _with_prompt_logprobs(outputs, result, self._requests.keys() | set(finished))
        if self._batching.is_closed:
            failed = [output for output in outputs if output.error is not None]
            self._held.hold(output for output in outputs if output.error is None)
            outputs = self._disband(now) if self._batching.is_over and not self._in_flight else []
            finished = [output.request_id for output in outputs]
            outputs = failed + outputs
        self._batch.drop_finished()
        if self._events is not None:
            self._events.emit(plan.event(result, finished, now))
        return outputs

    def _fail(self, request: Request, error: str, now: float) -> EngineCoreOutput:
        """End a request that the executor cannot go on with; its token is no answer."""
        request.num_pending_tokens -= 1
        request.num_tokens -= 1
        self._end(request, FinishReason.ERROR, now)
        return EngineCoreOutput(request.request_id, [], FinishReason.ERROR.value, error=error)

    def _append(self, request: Request, result: ModelRunnerOutput, now: float) -> EngineCoreOutput:
        request_id = request.request_id
        tokens = result.token_ids[request_id]
        if len(tokens) > 1 or tokens[0] in request.stop_token_ids:
            tokens = _until_stop(request, tokens)
        token_ids = request.token_ids
        token_ids += tokens
        num_known = len(token_ids)
        request.num_pending_tokens -= 1
        request.num_tokens = num_known + request.num_pending_tokens
        logprobs = result.logprobs.get(request_id) if result.logprobs else None
        if logprobs is not None:
            logprobs = logprobs[: len(tokens)]
        # By position: names would cost as much again.
        output = EngineCoreOutput(request_id, tokens, None, None, logprobs, None, 0, request.num_preemptions)
        if request.first_token_time is None:
            request.first_token_time = now
            output = output._replace(num_cached_tokens=request.num_cached_tokens, times=_times(request))
        if request.stop_token_id is not None:
            reason = FinishReason.STOP
        elif num_known == request.end_total_tokens:
            reason = FinishReason.LENGTH
        else:
            return output
        self._end(request, reason, now)
        return _last(output, request, now)


def _last(output: EngineCoreOutput, request: Request, now: float) -> EngineCoreOutput:
    assert request.finish_reason is not None
    stats = RequestStats(
        steps_waited=request.steps_waited,
        num_recomputed_tokens=request.num_recomputed_tokens,
        num_padding_tokens=request.num_padding_tokens,
        kv_slot_seconds_held=request.kv_slot_seconds_held,
        kv_slot_seconds_used=request.kv_slot_seconds_used,
    )
    return output._replace(
        finish_reason=request.finish_reason.value,
        stop_token_id=request.stop_token_id,
        times=_times(request, finished=now),
        stats=stats,
    )


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
