"""Workloads made of workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.request import WorkloadRequest, full_prompt_lens, in_order


def with_arrivals(
    requests: Sequence[WorkloadRequest], arrivals: ArrivalProcess, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """The same requests in the same order at other times: for data sets that have none. Those that come after another
    one keep the time between."""
    times = iter(arrivals.times(rng, sum(request.after is None for request in requests)))
    return [replace(request, arrival=next(times)) if request.after is None else request for request in requests]


def fitting(requests: Sequence[WorkloadRequest], max_model_len: int) -> list[WorkloadRequest]:
    """The requests that fit with their history, whole prompt and declared output, into `max_model_len` tokens; without
    those that come after one that does not.

    Raises:
        ConfigError: as `in_order`.
    """
    lens = full_prompt_lens(requests)
    kept: set[str] = set()
    for request in in_order(requests):
        total = lens[request.request_id] + request.max_output_len
        if total <= max_model_len and (request.after is None or request.after in kept):
            kept.add(request.request_id)
    return [request for request in requests if request.request_id in kept]
