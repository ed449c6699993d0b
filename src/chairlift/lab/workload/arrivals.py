"""Arrival processes: the arrival times of requests in seconds after the first one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Arrival times with independent gamma-distributed gaps. The first is 0, so that no run starts with idle time.

    Attributes:
        request_rate: arrivals per second; None or infinite: all requests arrive at time 0.
        burstiness: the shape of the distribution; 1 is a Poisson process, less is burstier, more is steadier, infinity
            gives constant gaps. The coefficient of variation of the gaps is 1 / sqrt(burstiness).

    Raises:
        ConfigError: one of them is not positive, or a burstiness is given without a rate.
    """

    request_rate: float | None = None
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if self.request_rate in (None, math.inf) and self.burstiness != 1.0:
            raise ConfigError(
                f"burstiness={self.burstiness:g} shapes the gaps between arrivals: set a request_rate too"
            )
        for name, value in (("request_rate", self.request_rate), ("burstiness", self.burstiness)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be a positive number, got {value}")

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        """Returns `count` arrival times in seconds, ascending from 0."""
        rate, shape = self.request_rate, self.burstiness
        if rate is None or rate == math.inf:
            return [0.0] * count
        if shape == math.inf:
            return [index / rate for index in range(count)]
        times, num_gaps = np.zeros(count), max(0, count - 1)
        gaps = rng.exponential(1 / rate, num_gaps) if shape == 1 else rng.gamma(shape, 1 / (rate * shape), num_gaps)
        np.cumsum(gaps, out=times[1:])
        return times.tolist()


def with_arrivals(
    requests: Sequence[WorkloadRequest], arrivals: ArrivalProcess, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Returns the requests in the same order with new arrival times, for data sets without any."""
    times = arrivals.times(rng, len(requests))
    return [replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]
