"""The order of waiting requests, by the keys of the queue that the engine has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

from chairlift.config import SchedulerConfig
from chairlift.core.queues.queue_selection import make_queue
from chairlift.events import EngineStarted, RequestArrived
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.slo import SLO
from chairlift.step_time import StepTime


class QueueOrder:
    """The order of the requests in the queue, which is computed again only if they or their progress have changed."""

    def __init__(self) -> None:
        self._state: tuple[Any, ...] = ()
        self._order: list[TrackedRequest] = []
        self._is_fair = False

    def requests_ahead(
        self,
        started: EngineStarted,
        request: TrackedRequest,
        queued: Sequence[TrackedRequest],
        now: float,
        head_id: str | None,
    ) -> list[TrackedRequest]:
        """The requests that are ahead of `request` in the queue, in its order.

        The waiting requests are added to a new queue of the class that the engine uses. It does not know what the queue
        of the engine has recorded: the service of tenants, for which the head of the queue is the only request of
        another tenant whose position is known, and levels of `mlfq` after a preemption.

        Args:
            queued: the requests in the queue, with `request`.
            now: when the last step was scheduled.
        """
        # The order keeps the requests, so that their ids stay unique.
        state = started, now, [(id(each), each.num_output_tokens, each.num_preemptions) for each in queued]
        if state != self._state:
            self._sort(started, queued, now)
            self._state = state
        own = next(index for index, each in enumerate(self._order) if each is request)
        if not self._is_fair:
            return self._order[:own]
        return [
            each
            for index, each in enumerate(self._order)
            if (index < own if each.tenant == request.tenant else each.request_id == head_id)
        ]

    def _sort(self, started: EngineStarted, queued: Sequence[TrackedRequest], now: float) -> None:
        queue = make_queue(_scheduler_config(started), lambda _request: 0)
        by_request = {restored_request(each): each for each in queued}
        for each in by_request:
            queue.push(each)
        queue.begin_step(now)
        queue.peek()
        self._order = [by_request[each] for each in sorted(by_request, key=queue.key)]
        self._is_fair = queue.is_fair


def _scheduler_config(started: EngineStarted) -> SchedulerConfig:
    """The part of the configuration that determines the order of waiting requests."""
    return SchedulerConfig(
        started.max_model_len,
        started.max_num_seqs,
        started.max_num_batched_tokens,
        started.scheduling_policy,
        length_predictor=started.length_predictor,
        step_time=None if started.step_time is None else StepTime(**started.step_time),
    )


def restored_request(tracked: TrackedRequest) -> Request:
    """A request of the scheduler as it is in the queue, with consecutive numbers as its tokens."""
    arrived = tracked.arrived
    slo = None if arrived.slo is None else SLO(**arrived.slo)
    request = request_of_size(arrived, arrived.num_prompt_tokens + tracked.num_output_tokens, slo)
    request.arrival_index, request.predicted_len = tracked.index, arrived.predicted_len
    request.num_preemptions = tracked.num_preemptions
    return request


@lru_cache(maxsize=64)
def _sampling_params(slo: SLO | None, is_streamed: bool) -> SamplingParams:
    """The parameters of many requests, whose checks take longer than the rest of a restored request."""
    return SamplingParams(slo=slo, is_streamed=is_streamed)


def request_of_size(arrived: RequestArrived, num_tokens: int, slo: SLO | None = None) -> Request:
    """A request of the scheduler with consecutive numbers as its tokens, which take no memory."""
    request = Request(
        arrived.request_id,
        [0],
        _sampling_params(slo, arrived.is_streamed),
        arrived.max_tokens,
        arrival_time=arrived.time,
        priority=arrived.priority,
        output_len=arrived.output_len,
        tenant=arrived.tenant,
    )
    request.token_ids = cast("list[int]", range(num_tokens))
    request.num_prompt_tokens, request.num_tokens = arrived.num_prompt_tokens, num_tokens
    request.max_total_tokens += arrived.num_prompt_tokens - 1
    request.end_total_tokens += arrived.num_prompt_tokens - 1
    return request
