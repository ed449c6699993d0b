"""How much load an engine takes: what presets that sweep request rates share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from chairlift.engine.startup.model_shape import ModelShape
from chairlift.events import Event
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.metrics.run import RunMetrics, RunTally
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.devices import Device
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest

MEMORY_SHARE: Final = 0.9
"""Of the devices' memory, for weights, K and V: vLLM's default `gpu_memory_utilization`."""


def num_kv_slots(model: ModelShape, device: Device, num_devices: int) -> int:
    """Slots that fit beside the weights on devices that share a model."""
    num_bytes = MEMORY_SHARE * num_devices * device.memory_bytes - model.weight_bytes
    assert num_bytes > 0, f"{model.name} does not fit {num_devices} of {device.name}"
    return int(num_bytes // model.kv_bytes_per_slot)


class _Both:
    """Hands every event to the tally of the run and to that of its requests."""

    def __init__(self, requests: list[RequestMetrics]) -> None:
        self.run = RunTally()
        self._requests = RequestTally(lambda _, metrics: requests.append(metrics))

    def emit(self, event: Event) -> None:
        self.run.emit(event)
        self._requests.emit(event)


def measure(
    requests: Sequence[WorkloadRequest],
    config: SimConfig,
    cost_model: CostModel,
    answered: list[RequestMetrics] | None = None,
) -> RunMetrics:
    """Simulate to the end; every request must fit.

    Args:
        answered: gets the metrics of each request, in the order in which they ended.
    """
    tally = RunTally() if answered is None else _Both(answered)
    result = simulate(requests, config, cost_model, tally)
    assert not result.rejected, result.rejected[0]
    return tally.result() if isinstance(tally, RunTally) else tally.run.result()


def highest_rate(holds: Callable[[float], bool], start: float, tolerance: float = 0.02) -> float:
    """The highest request rate at which something holds, given that it does not hold at any higher one.

    Doubles or halves `start` until the rate is enclosed, then halves the range on a logarithmic scale.

    Args:
        tolerance: a rate higher by this share does not hold.

    Returns:
        0.0 if it does not hold even at a thousandth of `start`, infinity if it still does at a thousand times that.
    """
    low = high = start
    if holds(start):
        while holds(high := low * 2):
            low = high
            if low > 1000 * start:
                return math.inf
    else:
        while not holds(low := high / 2):
            high = low
            if high < start / 1000:
                return 0.0
    while high > low * (1 + tolerance):
        rate = math.sqrt(low * high)
        if holds(rate):
            low = rate
        else:
            high = rate
    return low


def at_rate(requests: Sequence[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Requests that arrive once a second on average, `rate` times as fast: the same draws at every rate."""
    return [replace(request, arrival=request.arrival / rate) for request in requests]
