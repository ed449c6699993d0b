"""Arrival processes: rates, burstiness, and the process that the options select."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess, with_arrivals
from chairlift.lab.workload.request import WorkloadRequest

MANY = 20_000


def gaps(process: ArrivalProcess) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    times = process.times(np.random.default_rng(1), MANY)
    assert len(times) == MANY
    assert times[0] == 0
    assert all(later >= earlier for earlier, later in pairwise(times))
    return np.diff(np.array(times))


@pytest.mark.parametrize(
    ("process", "variation"),
    [
        (ArrivalProcess(4.0), 1.0),
        (ArrivalProcess(4.0, 0.25), 2.0),
        (ArrivalProcess(4.0, 16.0), 0.25),
        (ArrivalProcess(4.0, math.inf), 0),
    ],
)
def test_rate_and_variation(process: ArrivalProcess, variation: float) -> None:
    between = gaps(process)
    assert between.mean() == pytest.approx(1 / 4, rel=0.05)
    assert between.std() / between.mean() == pytest.approx(variation, rel=0.05, abs=1e-9)


@pytest.mark.parametrize("rate", [None, math.inf])
def test_all_requests_arrive_at_once_without_a_finite_rate(rate: float | None) -> None:
    assert ArrivalProcess(rate).times(np.random.default_rng(0), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "process", [ArrivalProcess(), ArrivalProcess(2.0), ArrivalProcess(2.0, 3.0), ArrivalProcess(2.0, math.inf)]
)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_times_depend_on_the_seed_only(process: ArrivalProcess, count: int) -> None:
    times = process.times(np.random.default_rng(3), count)
    assert len(times) == count
    assert times == process.times(np.random.default_rng(3), count)


@pytest.mark.parametrize(
    ("rate", "burstiness", "problem"),
    [
        (0.0, 1.0, "request_rate must be a positive number, got 0.0"),
        (math.nan, 1.0, "request_rate must be a positive number, got nan"),
        (1.0, -1.0, "burstiness must be a positive number, got -1.0"),
        (None, 2.0, "burstiness=2 .* set a request_rate"),
    ],
)
def test_invalid_options_are_rejected(rate: float | None, burstiness: float, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ArrivalProcess(rate, burstiness)


def test_with_arrivals_replaces_the_times() -> None:
    requests = [WorkloadRequest(name, 9.0, [1], 2) for name in "ab"]
    moved = with_arrivals(requests, ArrivalProcess(4.0, math.inf), np.random.default_rng(0))
    assert [(r.request_id, r.arrival) for r in moved] == [("a", 0.0), ("b", 0.25)]
