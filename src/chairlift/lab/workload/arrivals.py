"""Arrival processes: the arrival times of requests in seconds after the first one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest


class ArrivalProcess(Protocol):
    """A random process of arrival times, of which the first is 0, so that no run starts with idle time."""

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        """Returns `count` arrival times in seconds, ascending from 0."""
        ...


@dataclass(frozen=True, slots=True)
class BurstArrivals:
    """All requests arrive at time 0."""

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """One request arrives every 1 / rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return [index / self.rate for index in range(count)]


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Independent gamma-distributed gaps between arrivals.

    Attributes:
        rate: arrivals per second.
        burstiness: the shape of the distribution; 1 is a Poisson process, less is burstier, more is steadier. The
            coefficient of variation of the gaps is 1 / sqrt(burstiness).
    """

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)
        _positive("burstiness", self.burstiness)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return _times(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), max(0, count - 1)), count)


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """A Poisson process, with independent exponential gaps of mean 1 / rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return _times(rng.exponential(1 / self.rate, max(0, count - 1)), count)


def arrival_process(request_rate: float | None = None, burstiness: float = 1.0) -> ArrivalProcess:
    """Returns the process that the options `--request-rate` and `--burstiness` describe.

    Args:
        request_rate: requests per second; None or infinite: all at once.
        burstiness: the shape of the gaps (see GammaArrivals); infinite: constant gaps.

    Raises:
        ConfigError: one of them is not positive, or a burstiness is given without a rate.
    """
    if request_rate is None or request_rate == math.inf:
        if burstiness != 1.0:
            raise ConfigError(f"burstiness={burstiness:g} shapes the gaps between arrivals: set a request_rate too")
        return BurstArrivals()
    if burstiness == math.inf:
        return ConstantArrivals(request_rate)
    return PoissonArrivals(request_rate) if burstiness == 1.0 else GammaArrivals(request_rate, burstiness)


def with_arrivals(
    requests: Sequence[WorkloadRequest], arrivals: ArrivalProcess, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """Returns the requests in the same order with new arrival times, for data sets without any.

    Requests with `after` keep their delay.
    """
    times = iter(arrivals.times(rng, sum(request.after is None for request in requests)))
    return [replace(request, arrival=next(times)) if request.after is None else request for request in requests]


def _times(gaps: npt.NDArray[np.float64], count: int) -> list[float]:
    times = np.zeros(count)
    np.cumsum(gaps, out=times[1:])
    return times.tolist()


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, got {value}")
