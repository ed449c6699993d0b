"""Drives an engine through a workload, on the caller's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from chairlift.core.engine_core import EngineCore
from chairlift.engine.factory import Engine
from chairlift.engine.input_processor import EngineRequest
from chairlift.errors import ConfigError, RequestError
from chairlift.sampling_params import SamplingParams
from chairlift.workload.synthetic import WorkloadRequest


def forced_requests(engine: Engine, workload: Sequence[WorkloadRequest]) -> list[EngineRequest]:
    """The workload as greedy requests whose output has exactly the wanted length.

    Raises:
        ConfigError: a request does not fit the model or the pool, with the arithmetic.
    """
    requests: list[EngineRequest] = []
    for item in workload:
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=item.output_len)
        try:
            _, token_ids = engine.input_processor.encode(item.prompt_token_ids)
            (request,) = engine.input_processor.make(item.request_id, token_ids, params, arrival_time=item.arrival)
            requests.append(replace(request, request_id=item.request_id))
        except RequestError as error:
            raise ConfigError(
                f"workload request {item.request_id} ({len(item.prompt_token_ids)} prompt, {item.output_len} output "
                f"tokens) does not fit: {error} In a benchmark: narrow the length distributions, or enlarge the pool."
            ) from None
    return requests


def drive(core: EngineCore, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Run the requests to their end; returns the output tokens of each, by id.

    A request's arrival time is when it was due, even if a step kept the engine from noticing: the load does not wait
    for the server (open loop).

    Args:
        requests: in order of arrival, `arrival_time` in seconds after the start.
    """
    start = core.now()
    due = deque(replace(request, arrival_time=start + request.arrival_time) for request in requests)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while due or core.has_work:
        now = core.now()
        while due and due[0].arrival_time <= now:
            core.add(due.popleft().to_request())
        if not core.has_work:
            time.sleep(max(0.0, due[0].arrival_time - now))
            continue
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
    return tokens


def drive_all_at_once(engine: Engine, workload: Sequence[WorkloadRequest]) -> dict[str, list[int]]:
    """Run the workload as a burst, whatever its arrivals; returns the output tokens of each request, by id.

    Raises:
        ConfigError: as `forced_requests`.
    """
    burst = [replace(item, arrival=0.0) for item in workload]
    return drive(engine.core, forced_requests(engine, burst))
