"""The scheduler: decides how many tokens of each request the next step computes.

    add --> PARKED ----> WAITING --admit--> RUNNING --stop, length--> FINISHED
              siblings      ^                  |
                            +----preempted-----+      abort: from any state, at once

`schedule` advances `num_computed_tokens`, and `update` appends the sampled tokens. Several schedules may be ahead of
their updates: a pending token counts in `num_tokens` before the device has returned its value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from chairlift.config import SchedulerConfig
from chairlift.core.continuous_batching import BatchingPolicy, ContinuousBatching
from chairlift.core.kv.accounting import slot_usage
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.parked_siblings import ParkedSiblings
from chairlift.core.running_batch import RunningBatch, StepPlan
from chairlift.core.scheduling_policies import FairPolicy, FCFSPolicy, PriorityPolicy
from chairlift.core.speculation.draft_selection import DraftSelection
from chairlift.core.wait_log import WaitLog
from chairlift.errors import RequestError
from chairlift.events import EventSink, PrefixCacheChanged, RequestArrived, RequestFinished, RequestRejected
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, attach_prompt_logprobs
from chairlift.request import FinishReason, Request, RequestStatus, WaitReason


class Scheduler:
    """Plans steps over the unfinished requests.

    Args:
        events: receives what happens; without it no event is built.
        make_batching: creates the policy that `config.batching` names; `baselines.selection.make_scheduler` chooses it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        events: EventSink | None = None,
        make_batching: Callable[[RunningBatch], BatchingPolicy] = ContinuousBatching,
    ) -> None:
        self._config = config
        self._kv = kv_cache_manager
        self._events = events
        self._requests: dict[str, Request] = {}
        self._siblings = ParkedSiblings()
        self._waits = WaitLog(kv_cache_manager, events, is_fair=config.scheduling_policy == "fair")
        self._batch = RunningBatch(config, kv_cache_manager, _make_scheduling_policy(config), self._waits)
        self._batching = make_batching(self._batch)
        assert self._batching.name == config.batching, "make_batching creates the policy that the configuration names"
        speculative = config.speculative_config
        self._drafts = None if speculative is None else DraftSelection(config, speculative)
        self._outbox: list[EngineCoreOutput] = []
        self._in_flight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, str]] = []
        self._num_arrived = 0
        self._step = 0

    @property
    def unfinished(self) -> Mapping[str, Request]:
        """Unfinished requests by id, in the order of arrival."""
        return self._requests

    @property
    def num_running(self) -> int:
        return self._batch.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue and of parked siblings."""
        return len(self._batch.waiting) + len(self._siblings)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._outbox)

    @property
    def is_idle(self) -> bool:
        """No request is unfinished, and every block is free."""
        return not self._requests and self._kv.num_free_blocks == self._kv.num_blocks

    def add(self, request: Request) -> None:
        """Queue a request, or park it while its leader's prompt is being computed.

        Raises:
            RequestError: the id is in use, or the request could not run even alone (with the arithmetic).
        """
        try:
            self._check(request)
        except RequestError as error:
            if self._events is not None:
                self._events.emit(RequestRejected(request.arrival_time, request.request_id, str(error)))
            raise
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.request_id))
        if self._events is not None:
            self._events.emit(RequestArrived.from_request(request, self._step))
        leader = self._requests.get(request.leader_id) if request.leader_id is not None else None
        if leader is not None and leader.num_computed_tokens < leader.num_prompt_tokens:
            self._siblings.park(request, leader.request_id)
            self._waits.start(request)
            self._waits.record_reason(request, WaitReason.SIBLING_PREFILL, request.arrival_time, self.num_running)
        else:
            self._batch.enqueue(request)

    def _check(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use by an unfinished request", "request_id")
        if self._num_total_tokens(request) > self._config.max_model_len:
            raise RequestError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} output tokens exceed "
                f"max_model_len={self._config.max_model_len}",
                "max_tokens",
            )
        self._kv.check_fits(request)
        self._batching.check(request)

    def _num_total_tokens(self, request: Request) -> int:
        return request.num_prompt_tokens if self._config.is_pooling else request.max_total_tokens

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Finish a request in any state, without further output. False if no such request is unfinished."""
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        self._finish(request, reason, now)
        self._outbox += self._release_completed(now)
        return True

    def charge_remote_service(self, service: Mapping[str, float]) -> None:
        """Charge tenants for what other engines gave them since the last call. Only fair sharing depends on it."""
        self._batch.charge_remote_service(service)

    def abort_expired(self, now: float) -> None:
        """Abort the requests whose deadline has passed. The next `take_outbox` returns their outputs."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is None or request.deadline is None or request.deadline > now:
                continue
            if self.abort(request_id, now, FinishReason.TIMEOUT):
                self._outbox.append(request.timeout_output())

    def take_outbox(self) -> list[EngineCoreOutput]:
        """Remove and return the outputs of expired requests, and of a batch that an abort completed."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        request.finish_reason = reason
        if self._batching.retains_finished and request.status is RequestStatus.RUNNING:
            request.done_time = now
        else:
            self._remove(request, now)

    def _remove(self, request: Request, now: float) -> None:
        status, request.status = request.status, RequestStatus.FINISHED
        if status is RequestStatus.RUNNING:
            self._batch.remove(request, now)
        elif status is RequestStatus.WAITING:
            self._batch.waiting.discard(request)
        else:
            self._siblings.discard(request)
        if status is not RequestStatus.RUNNING:
            self._waits.stop(request)
        self._kv.forget(request)
        if self._drafts is not None:
            self._drafts.forget(request.request_id)
        del self._requests[request.request_id]
        if self._events is not None:
            self._events.emit(RequestFinished.from_request(request, now, self._step))
        self._release_siblings(request, now)

    def _release_siblings(self, leader: Request, now: float) -> None:
        for sibling in self._siblings.release(leader):
            self._waits.release(sibling, now)
            self._batch.enqueue(sibling)

    def _release_completed(self, now: float) -> list[EngineCoreOutput]:
        """Remove the finished requests that the batching policy has retained, and return their outputs."""
        if self._in_flight:
            return []
        outputs = []
        for request, output in self._batching.take_completed(now):
            self._remove(request, now)
            if output is not None:
                outputs.append(request.final_output(output, now))
        if self._batching.retains_finished:
            self._batch.drop_finished()
        return outputs

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step and advance `num_computed_tokens`; None if there is nothing to compute now.

        With speculative decoding a step is planned only when the results of all others are known.
        """
        if self._drafts is not None and self._in_flight:
            return None
        self._batch.begin_step(now)
        plan = StepPlan(SchedulerOutput(self._step, {}), now)
        self._batching.fill(plan)
        if not plan.output.num_scheduled_tokens:
            return None
        if self._drafts is not None:
            self._drafts.extend(plan)
        self._batch.end_step(plan)
        self._waits.count_step(plan.wait_reason, plan.head)
        for request in plan.prefilled:
            self._release_siblings(request, now)
        self._step += 1
        self._in_flight.append(plan)
        if self._events is not None:
            plan.state = self._state(plan.wait_reason)
        return plan.output

    def _state(self, wait_reason: WaitReason | None) -> dict[str, int]:
        return {
            "num_running": len(self._batch.running),
            "num_waiting": self.num_waiting,
            "free_blocks": self._kv.num_free_blocks,
            "evictable_blocks": self._kv.num_evictable_blocks,
            **slot_usage(self._batch.running, self._kv, wait_reason)._asdict(),
        }

    def update(self, result: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Process the result of the oldest step in flight; returns the outputs that leave the engine now."""
        plan = self._in_flight.popleft()
        assert plan.output.step == result.step, "results arrive in the order of their steps"
        outputs: list[EngineCoreOutput] = []
        finished: list[str] = []
        for request in plan.sampling:
            if request.finish_reason is not None:
                continue
            if result.errors and request.request_id in result.errors:
                outputs.append(self._fail(request, result.errors[request.request_id], now))
            elif self._config.is_pooling:
                outputs.append(self._finish_pooled(request, result.pooled[request.request_id], now))
            else:
                outputs.append(self._append_tokens(request, result, plan, now))
            if request.finish_reason is not None and request.is_finished:
                finished.append(request.request_id)
        if result.prompt_logprobs:
            known = self._requests.keys() | set(finished)
            outputs = attach_prompt_logprobs(outputs, {k: v for k, v in result.prompt_logprobs.items() if k in known})
        outputs = self._batching.buffer(outputs)
        if completed := self._release_completed(now):
            outputs += completed
            finished += [output.request_id for output in completed]
        self._batch.drop_finished()
        if self._events is not None:
            self._events.emit(plan.event(result, finished, now))
            if (changes := self._kv.take_index_changes()) is not None:
                self._events.emit(PrefixCacheChanged(now, *changes))
        return outputs

    def _fail(self, request: Request, error: str, now: float) -> EngineCoreOutput:
        """Finish a request that the executor cannot continue. Its sampled token is discarded."""
        request.drop_pending()
        self._finish(request, FinishReason.ERROR, now)
        return EngineCoreOutput(request.request_id, [], FinishReason.ERROR.value, error=error)

    def _finish_pooled(self, request: Request, pooled: bytes, now: float) -> EngineCoreOutput:
        """Finish a request that generates no tokens. The place of its next token is given up."""
        request.drop_pending()
        output = EngineCoreOutput(request.request_id, [], num_cached_tokens=request.num_cached_tokens, pooled=pooled)
        self._finish(request, FinishReason.STOP, now)
        return request.final_output(output, now)

    def _append_tokens(
        self, request: Request, result: ModelRunnerOutput, plan: StepPlan, now: float
    ) -> EngineCoreOutput:
        request_id = request.request_id
        tokens = request.append_sampled(result.token_ids[request_id])
        if self._drafts is not None:
            result.token_ids[request_id] = tokens  # without those after a stop token, so that events do not count them
            self._drafts.record(request, tokens, plan.output.num_drafts(request_id))
            self._batch.accept_drafts(request, len(tokens) - 1, plan)
        logprobs = result.logprobs.get(request_id) if result.logprobs else None
        if logprobs is not None:
            logprobs = logprobs[: len(tokens)]
        # Positional arguments, because keywords would double the cost of this call.
        output = EngineCoreOutput(request_id, tokens, None, None, logprobs, None, 0, request.num_preemptions)
        if request.first_token_time is None:
            request.first_token_time = now
            output = output._replace(num_cached_tokens=request.num_cached_tokens, times=request.times())
        if request.stop_token_id is not None:
            self._finish(request, FinishReason.STOP, now)
        elif len(request.token_ids) == request.end_total_tokens:
            self._finish(request, FinishReason.LENGTH, now)
        else:
            return output
        return request.final_output(output, now)


def _make_scheduling_policy(config: SchedulerConfig) -> FCFSPolicy:
    if config.scheduling_policy == "fair":
        return FairPolicy(config.tenant_weights)
    return PriorityPolicy() if config.scheduling_policy == "priority" else FCFSPolicy()
