"""Workloads with shared prefixes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import FixedLength, UniformLengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import shared_prefixes


def prefixed(**changes: Any) -> list[WorkloadRequest]:
    arguments: dict[str, Any] = {
        "seed": 1,
        "count": 400,
        "num_prefixes": 4,
        "prefix": FixedLength(20),
        "suffix": UniformLengths(1, 9),
        "output": UniformLengths(2, 5),
        "arrivals": ArrivalProcess(3.0),
        "vocab_size": 1000,
    }
    return shared_prefixes(**{**arguments, **changes})


def uses(workload: list[WorkloadRequest]) -> list[int]:
    """Returns the number of uses of each prefix, in descending order."""
    return [n for _, n in Counter(tuple(r.prompt_token_ids[:20]) for r in workload).most_common()]


def test_prefixes_are_shared_and_suffixes_are_not() -> None:
    workload = prefixed()
    assert len(uses(workload)) == 4
    assert min(uses(workload)) > 60
    assert all(21 <= len(r.prompt_token_ids) <= 29 for r in workload)
    assert len({tuple(r.prompt_token_ids) for r in workload if len(r.prompt_token_ids) > 25}) == sum(
        len(r.prompt_token_ids) > 25 for r in workload
    )
    assert workload == prefixed()
    assert workload != prefixed(seed=2)


def test_zipf_prefers_the_first_prefix() -> None:
    counts = uses(prefixed(count=4000, zipf=1.0))
    shares = 1 / np.arange(1, 5) / sum(1 / np.arange(1, 5))
    assert np.array(counts) / 4000 == pytest.approx(shares, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_prefixes": 0}, "num_prefixes must be at least 1, got 0"),
        ({"zipf": -1.0}, "zipf must be a number >= 0, got -1.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
    ],
)
def test_invalid_numbers_are_rejected(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        prefixed(**changes)
