"""Runs a workload on an engine, on the thread of the caller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from chairlift.engine.input_processor import EngineRequest
from chairlift.engine.startup.factory import Engine
from chairlift.errors import ConfigError, RequestError
from chairlift.events import EventList
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.request import Request


def forced_requests(engine: Engine, workload: Sequence[WorkloadRequest]) -> list[EngineRequest]:
    """Create greedy requests with exactly the output lengths of the workload, independent of their `max_tokens`.

    Raises:
        ConfigError: a request does not fit the model or the pool. The message has the arithmetic.
    """
    requests: list[EngineRequest] = []
    for item in workload:
        try:
            requests.append(_forced_request(engine, item))
        except RequestError as error:
            declared = "" if item.max_tokens is None else f", max_tokens {item.max_tokens}"
            raise ConfigError(
                f"workload request {item.request_id} ({len(item.prompt_token_ids)} prompt, {item.output_len} output "
                f"tokens{declared}) does not fit: {error} In a benchmark: narrow the length distributions, or enlarge "
                "the pool."
            ) from None
    return requests


def _forced_request(engine: Engine, item: WorkloadRequest) -> EngineRequest:
    """Create one request, whose output has exactly `item.output_len` tokens.

    The input processor sets the output length to `max_tokens`, so `output_len` is replaced afterwards.
    """
    params = item.sampling_params
    _, token_ids = engine.input_processor.encode(list(item.prompt_token_ids))
    (request,) = engine.input_processor.make(
        item.request_id, token_ids, params, arrival_time=item.arrival, priority=item.priority, tenant=item.tenant
    )
    return replace(request, request_id=item.request_id, output_len=item.output_len)


def drive(
    engine: Engine, workload: Sequence[WorkloadRequest], max_concurrency: int | None = None
) -> dict[str, list[int]]:
    """Run the workload to its end and return the output tokens of each request by id.

    The arrival time of a request is the time at which it was due, even if a step delayed its submission.

    Args:
        max_concurrency: maximum number of concurrent requests; None is no limit.

    Raises:
        ConfigError: a request does not fit the engine, or the workload is invalid (see `RequestFeed`).
    """
    core = engine.core
    first = [item for item in workload if item.continues is None]
    prepared = {request.request_id: request for request in forced_requests(engine, first)}
    tokens: dict[str, list[int]] = {item.request_id: [] for item in workload}
    unfinished: dict[str, Request] = {}
    feed = RequestFeed(workload, max_concurrency)
    start = core.now()
    while not feed.is_exhausted or core.has_work:
        now = core.now() - start
        for item in feed.pop_due(now):
            (made,) = [prepared.pop(item.request_id)] if item.continues is None else forced_requests(engine, [item])
            unfinished[item.request_id] = request = replace(made, arrival_time=start + item.arrival).to_request()
            core.add(request)
        if not core.has_work:
            next_time = feed.next_time()
            assert next_time is not None, "the engine is idle, so the next request has an arrival time"
            time.sleep(max(0.0, next_time - now))
            continue
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                request = unfinished.pop(output.request_id)
                feed.finish(output.request_id, core.now() - start, request.token_ids)
    return tokens


def run_forced(
    engine: Engine, log: EventList, workload: Sequence[WorkloadRequest], max_concurrency: int | None = None
) -> dict[str, list[int]]:
    """Run the workload to its end; its events replace the events of the previous run in the log of the engine.

    Returns:
        The output tokens of each request by id, whose numbers are checked.
    """
    del log.events[1:]
    tokens = drive(engine, workload, max_concurrency)
    for item in workload:
        assert len(tokens[item.request_id]) == item.output_len, "a request has not the forced number of tokens"
    return tokens


def drive_all_at_once(engine: Engine, workload: Sequence[WorkloadRequest]) -> dict[str, list[int]]:
    """Run the workload with all arrivals at the start and return the output tokens of each request by id.

    Raises:
        ConfigError: see `drive`.
    """
    return drive(engine, [replace(item, arrival=0.0) for item in workload])
