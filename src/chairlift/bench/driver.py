"""Drives an engine through a workload, on the caller's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

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
            requests += engine.input_processor.make(item.request_id, token_ids, params)
        except RequestError as error:
            raise ConfigError(
                f"workload request {item.request_id} ({len(item.prompt_token_ids)} prompt, {item.output_len} output "
                f"tokens) does not fit: {error} In a benchmark: narrow the length distributions, or enlarge the pool."
            ) from None
    return requests


def drive(core: EngineCore, requests: Sequence[EngineRequest], arrivals: Sequence[float]) -> dict[str, list[int]]:
    """Run the requests to their end; returns the output tokens of each, by id.

    A request's arrival time is when it was due, even if a step kept the engine from noticing: the load does not wait
    for the server (open loop).

    Args:
        requests: in order of arrival.
        arrivals: seconds after the start, one a request, ascending.
    """
    start = core.now()
    due = deque((start + offset, request) for request, offset in zip(requests, arrivals, strict=True))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while due or core.has_work:
        now = core.now()
        while due and due[0][0] <= now:
            arrival, request = due.popleft()
            core.add(request.to_request(arrival))
        if not core.has_work:
            time.sleep(max(0.0, due[0][0] - now))
            continue
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
    return tokens


def drive_all_at_once(engine: Engine, workload: Sequence[WorkloadRequest]) -> dict[str, list[int]]:
    """Run the workload as a burst, whatever its arrivals; returns the output tokens of each request, by id.

    Raises:
        ConfigError: as `forced_requests`.
    """
    return drive(engine.core, forced_requests(engine, workload), [0.0] * len(workload))
