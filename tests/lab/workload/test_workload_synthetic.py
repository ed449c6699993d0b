"""Synthetic workloads: separate random streams, arrival processes and shared prefixes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess, with_arrivals
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload


def make(**changes: Any) -> list[WorkloadRequest]:
    arguments: dict[str, Any] = {
        "seed": 5,
        "count": 40,
        "prompt": parse_lengths("uniform:4..30"),
        "output": parse_lengths("exp:20"),
        "arrivals": ArrivalProcess(8.0),
        "vocab_size": 100,
    }
    return make_workload(**{**arguments, **changes})


def prompts(workload: list[WorkloadRequest]) -> list[list[int]]:
    return [request.prompt_token_ids for request in workload]


def test_requests_have_the_drawn_lengths() -> None:
    workload = make()
    assert len({request.request_id for request in workload}) == 40
    assert all(4 <= len(request.prompt_token_ids) <= 30 and request.output_len >= 1 for request in workload)
    assert {token for prompt in prompts(workload) for token in prompt} <= set(range(100))
    assert [request.arrival for request in workload] == sorted(request.arrival for request in workload)


def test_draws_depend_on_the_seed_and_not_on_other_draws() -> None:
    assert make() == make()
    assert prompts(make()) != prompts(make(seed=6))
    assert prompts(make(output=parse_lengths("fixed:3"), arrivals=ArrivalProcess())) == prompts(make())
    shorter = make(prompt=parse_lengths("fixed:2"))
    assert [(r.arrival, r.output_len) for r in shorter] == [(r.arrival, r.output_len) for r in make()]


def test_another_round_has_other_tokens_and_the_same_lengths() -> None:
    first, second = make(), make(token_round=1)
    assert not {r.request_id for r in first} & {r.request_id for r in second}
    assert [(len(r.prompt_token_ids), r.output_len, r.arrival) for r in first] == [
        (len(r.prompt_token_ids), r.output_len, r.arrival) for r in second
    ]
    assert not any(a[:4] == b[:4] for a, b in zip(prompts(first), prompts(second), strict=True))


@pytest.mark.parametrize(("name", "value"), [("count", 0), ("vocab_size", 0), ("seed", -1), ("prefix_len", -3)])
def test_invalid_numbers_are_rejected(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least .*, got {value}"):
        make(**{name: value})


def test_max_tokens_is_at_least_the_output_length() -> None:
    workload = make(max_tokens=parse_lengths("uniform:10..40"))
    assert [r.output_len for r in workload] == [r.output_len for r in make()]
    limits = [r.max_output_len for r in workload]
    assert all(max(10, r.output_len) <= r.max_output_len <= max(40, r.output_len) for r in workload)
    assert len(set(limits)) > 10
    assert {r.max_tokens for r in make()} == {None}


def test_pairs_fit_max_model_len() -> None:
    workload = make(count=300, max_model_len=35)
    assert max(len(r.prompt_token_ids) + r.output_len for r in workload) <= 35
    assert max(len(r.prompt_token_ids) + r.output_len for r in make(count=300)) > 35


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


def prefixed(**changes: Any) -> list[WorkloadRequest]:
    arguments: dict[str, Any] = {
        "seed": 1,
        "count": 400,
        "prefix_len": 20,
        "prompt": parse_lengths("uniform:1..9"),
        "output": parse_lengths("uniform:2..5"),
        "arrivals": ArrivalProcess(3.0),
        "vocab_size": 1000,
    }
    return make_workload(**{**arguments, **changes})


def test_the_prefix_is_shared_and_suffixes_are_not() -> None:
    workload = prefixed()
    assert len({tuple(r.prompt_token_ids[:20]) for r in workload}) == 1
    assert all(21 <= len(r.prompt_token_ids) <= 29 for r in workload)
    long = [tuple(r.prompt_token_ids) for r in workload if len(r.prompt_token_ids) > 25]
    assert len(set(long)) == len(long)
    assert workload == prefixed()
    assert workload != prefixed(seed=2)
