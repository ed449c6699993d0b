"""The order of waiting requests, by the keys of the queue that the engine has."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.config import SchedulerConfig
from chairlift.core.queues.queue_selection import make_queue
from chairlift.events import EngineStarted, RequestArrived
from chairlift.observability.tracked_request import TrackedRequest
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from chairlift.slo import SLO
from chairlift.step_time import StepTime


def requests_ahead(
    started: EngineStarted, request: TrackedRequest, others: Sequence[TrackedRequest], now: float, head_id: str | None
) -> list[TrackedRequest]:
    """The requests that are ahead of `request` in the queue, in its order.

    The waiting requests are added to a new queue of the class that the engine uses. It does not know what the queue of
    the engine has recorded: the service of tenants, for which the head of the queue is the only request of another
    tenant whose position is known, and levels of `mlfq` after a preemption.

    Args:
        others: the other requests in the queue.
        now: when the last step was scheduled.
    """
    queue = make_queue(_scheduler_config(started), lambda _request: 0)
    by_request = {restored_request(each): each for each in (request, *others)}
    for each in by_request:
        queue.push(each)
    queue.begin_step(now)
    queue.peek()

    def is_ahead(other: Request, own: Request) -> bool:
        if queue.is_fair and other.tenant != own.tenant:
            return other.request_id == head_id
        return queue.key(other) < queue.key(own)

    own = next(iter(by_request))
    return [by_request[each] for each in sorted(by_request, key=queue.key) if each is not own and is_ahead(each, own)]


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
    """A request of the scheduler as it is in the queue, with zeros as its tokens."""
    arrived = tracked.arrived
    slo = None if arrived.slo is None else SLO(**arrived.slo)
    request = request_of_size(arrived, arrived.num_prompt_tokens + tracked.num_output_tokens, slo)
    request.arrival_index, request.predicted_len = tracked.index, arrived.predicted_len
    request.num_preemptions = tracked.num_preemptions
    return request


def request_of_size(arrived: RequestArrived, num_tokens: int, slo: SLO | None = None) -> Request:
    """A request of the scheduler with zeros as its tokens."""
    request = Request(
        arrived.request_id,
        [0] * arrived.num_prompt_tokens,
        SamplingParams(slo=slo, is_streamed=arrived.is_streamed),
        arrived.max_tokens,
        arrival_time=arrived.time,
        priority=arrived.priority,
        output_len=arrived.output_len,
        tenant=arrived.tenant,
    )
    request.token_ids += [0] * (num_tokens - arrived.num_prompt_tokens)
    request.num_tokens = len(request.token_ids)
    return request
