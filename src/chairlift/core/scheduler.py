"""The scheduler: decides how many tokens of each request the next step computes.

    add ------------------> WAITING --admit--> RUNNING --stop, length, error--> FINISHED
      |                     ^     ^               |
      +-- PARKED (sibling) -+     +---preempted---+           abort: from any state, at once

`schedule` advances `num_computed_tokens`, and `update` appends the sampled tokens. Several schedules may be ahead of
their updates: a pending token counts in `num_tokens` before the device has returned its value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from chairlift.config import SchedulerConfig
from chairlift.core.beam_group import add_beam, advance_groups
from chairlift.core.continuous_batching import ContinuousBatching, NextStep, RunningBatch
from chairlift.core.deadlines import Deadlines, timeout_output
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.length_predictors import make_length_predictor
from chairlift.core.measuring.request_meter import RequestMeter
from chairlift.core.measuring.scheduler_observer import SchedulerObserver
from chairlift.core.parked_siblings import ParkedSiblings
from chairlift.core.queues.request_queue import RequestQueue
from chairlift.core.request_checks import check_limits
from chairlift.core.request_outputs import first_output, last_output
from chairlift.core.speculation.draft_selection import DraftSelection
from chairlift.errors import RequestError
from chairlift.outputs import EngineCoreOutput, ModelRunnerOutput, SchedulerOutput, attach_prompt_logprobs
from chairlift.request import FinishReason, Request, RequestStatus


class Scheduler:
    """Plans steps over the unfinished requests, and generates tokens with continuous batching.

    Args:
        observer: receives what happens; without it, outputs have no costs.

    Attributes:
        batching: the value of `SchedulerConfig.batching` that this class implements with `make_batch`.
    """

    batching = "continuous"
    make_batch: Callable[[SchedulerConfig, KVCacheManager, SchedulerObserver], RunningBatch] = ContinuousBatching

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, observer: SchedulerObserver | None = None) -> None:
        assert self.batching == config.batching, "the class implements the policy that the configuration names"
        self._config = config
        self._kv = kv
        self._observer = SchedulerObserver() if observer is None else observer
        self._batch = type(self).make_batch(config, kv, self._observer)
        self._lengths = make_length_predictor(config.length_predictor)
        self._requests: dict[str, Request] = {}
        self._siblings = ParkedSiblings()
        self._deadlines = Deadlines()
        speculative = config.speculative_config
        self._drafts = None if speculative is None else DraftSelection(config, speculative)
        self._needs_results = speculative is not None
        self._in_flight: deque[NextStep] = deque()
        self._outbox: list[EngineCoreOutput] = []
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
        """Number of requests in the queue, and of siblings that wait outside of it."""
        return len(self._requests) - self.num_running

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests or self._outbox)

    @property
    def is_idle(self) -> bool:
        """No request is unfinished, and every block is free."""
        return not self._requests and self._kv.is_empty

    # -- arrival -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or park it while its leader's prompt is being computed.

        Raises:
            RequestError: the id is in use, the request could not run even alone (with the arithmetic), or the length
                predictor needs a forced length.
        """
        try:
            self._check(request)
            request.predicted_len = self._lengths.predict(request)
        except RequestError as error:
            self._observer.record_rejection(request, error)
            raise
        request.arrival_index = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._deadlines.add(request)
        request.meter = RequestMeter()
        leader = self._requests.get(request.leader_id) if request.leader_id is not None else None
        if request.sampling_params.use_beam_search:
            add_beam(request, leader, self._batch, self._kv, self._observer)
        if leader is not None and not leader.is_prompt_computed:
            self._siblings.park(request, leader.request_id)
            self._observer.record_queued(request, request.arrival_time)
        else:
            self._batch.enqueue(request, request.arrival_time)

    def _check(self, request: Request) -> None:
        """Raise RequestError if the request cannot be served."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use by an unfinished request", "request_id")
        check_limits(request, self._config, self._kv)

    @property
    def queue(self) -> RequestQueue:
        """The waiting requests in the order of the scheduling policy."""
        return self._batch.waiting

    # -- a step --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step and advance `num_computed_tokens`; None if there is nothing to compute now.

        With speculative decoding or beams, a step is planned only when the results of all others are known.
        """
        if self._in_flight and (self._needs_results or self._batch.groups):
            return None
        self._batch.begin_step(now)
        plan = NextStep(SchedulerOutput(self._step, {}), now)
        self._batch.fill(plan)
        if not plan.output.num_scheduled_tokens:
            return None
        self._batch.end_step(plan)
        self._observer.record_step(plan.output, plan.requests, now)
        if self._drafts is not None:
            self._drafts.extend(plan.output, plan.sampling)
            self._kv.prefixes.plan_draft_checkpoints(plan.output, plan.sampling)
        for request in plan.prefilled:
            self._release_siblings(request, now)
        self._step += 1
        self._in_flight.append(plan)
        return plan.output

    def update(self, result: ModelRunnerOutput, now: float) -> list[EngineCoreOutput]:
        """Process the result of the oldest step in flight; returns the outputs that leave the engine now."""
        plan = self._in_flight.popleft()
        assert plan.output.step == result.step, "results arrive in the order of their steps"
        outputs: list[EngineCoreOutput] = []
        for request in plan.sampling:
            if request.finish_reason is not None:
                continue
            if result.errors and request.request_id in result.errors:
                outputs += self._fail(request, result.errors[request.request_id], now)
            elif request.group is not None:
                request.group.record(request, result)
            else:
                outputs.append(self._take_result(request, result, plan, now))
        if result.prompt_logprobs:
            known = self._requests.keys() | {output.request_id for output in outputs}
            outputs = attach_prompt_logprobs(outputs, {k: v for k, v in result.prompt_logprobs.items() if k in known})
        outputs = self._release_outputs(outputs, plan, now)
        self._batch.drop_finished()
        finished = [o.request_id for o in outputs if o.finish_reason and o.request_id not in self._requests]
        self._observer.record_result(result, finished, now)
        return outputs

    def _take_result(self, request: Request, result: ModelRunnerOutput, plan: NextStep, now: float) -> EngineCoreOutput:
        """Append the sampled tokens of a request, and finish it at a stop token or at its length."""
        request_id = request.request_id
        tokens = request.append_sampled(result.token_ids[request_id])
        if self._drafts is not None:
            result.token_ids[request_id] = tokens  # without those after a stop token, so that events do not count them
            self._drafts.record(request, tokens, plan.output.num_drafts(request_id))
            self._batch.accept_drafts(request, len(tokens) - 1, plan)
        logprobs = result.logprobs[request_id][: len(tokens)] if request_id in result.logprobs else None
        # Positional arguments, because keywords would double the cost of this call.
        output = EngineCoreOutput(request_id, tokens, None, None, logprobs, None, 0, request.num_preemptions)
        num_tokens = len(request.token_ids)
        if num_tokens - len(tokens) == request.num_prompt_tokens:
            output = first_output(request, output, now)
        if tokens[-1] in request.stop_token_ids:
            self._finish(request, FinishReason.STOP, now)
        elif num_tokens == request.end_total_tokens:
            self._finish(request, FinishReason.LENGTH, now)
        else:
            return output
        return last_output(request, output, now)

    def _fail(self, request: Request, error: str, now: float) -> list[EngineCoreOutput]:
        """Finish a request whose next token cannot be sampled. Its K and V are valid, and stay in the prefix cache."""
        members = [request] if request.group is None else request.group.members
        request.drop_pending()
        self._finish(request, FinishReason.ERROR, now)
        return [EngineCoreOutput(each.request_id, [], FinishReason.ERROR.value, error=error) for each in members]

    def _release_outputs(self, outputs: list[EngineCoreOutput], plan: NextStep, now: float) -> list[EngineCoreOutput]:
        """Return the outputs of a step that leave the engine now. A subclass may keep some of them."""
        return outputs + advance_groups(plan.sampling, self._finish, now) if self._batch.groups else outputs

    # -- the end of a request ------------------------------------------------------------------------------------

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """Finish a request in any state, without further output. False if no such request is unfinished."""
        request = self._requests.get(request_id)
        if request is None or request.finish_reason is not None:
            return False
        self._finish(request, reason, now)
        return True

    def abort_expired(self, now: float) -> None:
        """Abort the requests whose deadline has passed. The next `take_outbox` returns their outputs."""
        for request in self._deadlines.pop_expired(self._requests, now):
            self.abort(request.request_id, now, FinishReason.TIMEOUT)
            if request.finish_reason is FinishReason.TIMEOUT:  # also of a beam, which ended with another one
                self._outbox.append(timeout_output(request))

    def take_outbox(self) -> list[EngineCoreOutput]:
        """Remove and return the outputs that do not belong to the result of a step."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """Finish a request, with all beams of its search, which may have reasons of their own."""
        for each in [request] if request.group is None else request.group.close():
            each.finish_reason = each.finish_reason or reason
            self._remove(each, now)

    def _remove(self, request: Request, now: float) -> None:
        """Free all that a finished request has, in any state."""
        self._observer.record_finish(request, now)
        status, request.status = request.status, RequestStatus.FINISHED
        if status is RequestStatus.RUNNING:
            self._batch.remove(request)
        elif status is RequestStatus.WAITING:
            self._batch.waiting.discard(request)
        else:
            self._siblings.discard(request)
        self._kv.forget(request)
        self._lengths.record(request)
        self.queue.forget(request)
        if self._drafts is not None:
            self._drafts.forget(request.request_id)
        del self._requests[request.request_id]
        self._release_siblings(request, now)

    def _release_siblings(self, leader: Request, now: float) -> None:
        """Queue the siblings that waited for the prompt of this request, or the next leader if it was not computed."""
        for sibling in self._siblings.release(leader):
            self._batch.enqueue(sibling, now)
