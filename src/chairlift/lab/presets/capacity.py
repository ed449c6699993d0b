"""Measures simulated runs, and searches the highest request rate at which an engine meets a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from chairlift.engine.startup.model_shape import ModelShape
from chairlift.events import EventBroadcaster
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.metrics.run import RunMetrics, RunTally
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest

MEMORY_SHARE: Final = 0.9
"""The share of device memory for weights, K and V: the default of vLLM's `gpu_memory_utilization`."""


def num_kv_slots(model: ModelShape, device: Device, num_devices: int) -> int:
    """Returns the number of KV slots that fit into `num_devices` devices in addition to the weights of a model."""
    num_bytes = MEMORY_SHARE * num_devices * device.memory_bytes - model.weight_bytes
    assert num_bytes > 0, f"{model.name} does not fit into {num_devices} of {device.name}"
    return int(num_bytes // model.kv_bytes_per_slot)


def measure(
    requests: Sequence[WorkloadRequest],
    config: SimConfig,
    cost_model: CostModel,
    finished: list[RequestMetrics] | None = None,
) -> RunMetrics:
    """Simulates a workload to its end, and returns its metrics. Every request must fit.

    Args:
        finished: the metrics of each request are appended to it, in the order in which they finish.
    """
    tally = RunTally()
    sinks = [] if finished is None else [RequestTally(lambda _, metrics: finished.append(metrics))]
    result = simulate(requests, config, cost_model, EventBroadcaster(tally, *sinks))
    assert not result.rejected, result.rejected[0]
    return tally.result()


def highest_rate(is_met: Callable[[float], bool], start: float, tolerance: float = 0.02) -> float:
    """Returns the highest request rate at which a condition is met, if it is met at no higher one.

    The search doubles or halves `start` until the rate is enclosed, then halves the range on a logarithmic scale.

    Args:
        is_met: whether the condition is met at a rate in requests per second.
        tolerance: the condition is not met at a rate that is higher by this share.

    Returns:
        0.0 if it is not met at a thousandth of `start`, infinity if it is met at a thousand times `start`.
    """
    low = high = start
    if is_met(start):
        while is_met(high := low * 2):
            low = high
            if low > 1000 * start:
                return math.inf
    else:
        while not is_met(low := high / 2):
            high = low
            if high < start / 1000:
                return 0.0
    while high > low * (1 + tolerance):
        rate = math.sqrt(low * high)
        if is_met(rate):
            low = rate
        else:
            high = rate
    return low


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Returns requests that arrive once per second on average at `rate` per second instead; infinite: all at once."""
    return [replace(request, arrival=request.arrival / rate) for request in requests]
