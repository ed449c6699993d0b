"""Arrival processes: when requests come, in seconds after the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError


class ArrivalProcess(Protocol):
    """Arrival times. The first is 0, so that idle time before it is nobody's."""

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        """`count` arrival times in seconds, ascending from 0."""
        ...


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """A burst: everything arrives at 0."""

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return [0.0] * count


@dataclass(frozen=True, slots=True)
class Constant:
    """One request every 1 / rate seconds."""

    rate: float

    def __post_init__(self) -> None:
        _positive("request_rate", self.rate)

    def times(self, rng: np.random.Generator, count: int) -> list[float]:
        return [index / self.rate for index in range(count)]


@dataclass(frozen=True, slots=True)
class Gamma:
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
class Poisson:
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
        burstiness: shape of the gaps (see Gamma); infinite: constant gaps.

    Raises:
        ConfigError: one is not positive, or there is a burstiness and no rate.
    """
    if request_rate is None or request_rate == math.inf:
        if burstiness != 1.0:
            raise ConfigError(f"burstiness={burstiness:g} shapes the gaps between arrivals: give a request_rate too")
        return AllAtOnce()
    if burstiness == math.inf:
        return Constant(request_rate)
    return Poisson(request_rate) if burstiness == 1.0 else Gamma(request_rate, burstiness)


def _times(gaps: npt.NDArray[np.float64], count: int) -> list[float]:
    times = np.zeros(count)
    np.cumsum(gaps, out=times[1:])
    return times.tolist()


def _positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be a positive number, got {value}")
