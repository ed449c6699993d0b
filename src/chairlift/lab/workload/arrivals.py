"""Arrival processes: when requests come, in seconds after the first one."""

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
    """Arrival times. The first is 0, so that idle time before it is nobody's."""

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        """`count` arrival times in seconds, ascending from 0."""
        ...


@dataclass(frozen=True, slots=True)
class BurstArrivals:
    """A burst: everything arrives at 0."""

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class ConstantArrivals:
    """One request every 1 / rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return [index / self.rate for index in range(count)]


@dataclass(frozen=True, slots=True)
class GammaArrivals:
    """Independent gamma-distributed gaps of mean 1 / rate seconds and shape `burstiness`: 1 is a Poisson process, less
    is burstier (the gaps' coefficient of variation is 1 / sqrt(burstiness)), more is steadier."""

    rate: float
    burstiness: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)
        _positive("burstiness", self.burstiness)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return _times(rng.gamma(self.burstiness, 1 / (self.rate * self.burstiness), max(0, count - 1)), count)


@dataclass(frozen=True, slots=True)
class PoissonArrivals:
    """A Poisson process: independent exponential gaps of mean 1 / rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return _times(rng.exponential(1 / self.rate, max(0, count - 1)), count)


def arrival_process(request_rate: float | None = None, burstiness: float = 1.0) -> ArrivalProcess:
    """The process that the usual two options of a load generator describe.

    Args:
        request_rate: requests a second; None or infinite: all at once.
        burstiness: shape of the gaps (see GammaArrivals); infinite: constant gaps.

    Raises:
        ConfigError: one is not positive, or there is a burstiness and no rate.
    """
    if request_rate is None or request_rate == math.inf:
        if burstiness != 1.0:
            raise ConfigError(f"burstiness={burstiness:g} shapes the gaps between arrivals: give a request_rate too")
        return BurstArrivals()
    if burstiness == math.inf:
        return ConstantArrivals(request_rate)
    return PoissonArrivals(request_rate) if burstiness == 1.0 else GammaArrivals(request_rate, burstiness)


def with_arrivals(
    requests: Sequence[WorkloadRequest], arrivals: ArrivalProcess, rng: np.random.Generator
) -> list[WorkloadRequest]:
    """The same requests in the same order at other times: for data sets that have none. Those that come after another
    one keep the time between."""
    times = iter(arrivals.times(rng, sum(request.after is None for request in requests)))
    return [replace(request, arrival=next(times)) if request.after is None else request for request in requests]


def _times(gaps: npt.NDArray[np.float64], count: int) -> list[float]:
    times = np.zeros(count)
    np.cumsum(gaps, out=times[1:])
    return times.tolist()


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, got {value}")
