"""Workloads with shared prefixes, and conversations that carry their history."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import BurstArrivals, ConstantArrivals, PoissonArrivals
from chairlift.lab.workload.lengths import FixedLength, UniformLengths
from chairlift.lab.workload.request import WorkloadRequest, full_prompt_lens
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.lab.workload.synthetic import ThinkTime, conversations, shared_prefixes


def prefixed(**changes: Any) -> list[WorkloadRequest]:
    arguments: dict[str, Any] = {
        "seed": 1,
        "count": 400,
        "num_prefixes": 4,
        "prefix": FixedLength(20),
        "suffix": UniformLengths(1, 9),
        "output": UniformLengths(2, 5),
        "arrivals": PoissonArrivals(3.0),
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


def make_conversations(**changes: Any) -> list[WorkloadRequest]:
    arguments: dict[str, Any] = {
        "seed": 1,
        "count": 30,
        "turns": UniformLengths(1, 4),
        "message": UniformLengths(3, 9),
        "output": UniformLengths(2, 5),
        "arrivals": ConstantArrivals(2.0),
        "vocab_size": 1000,
    }
    return conversations(**{**arguments, **changes})


def test_each_turn_follows_the_one_before() -> None:
    workload = make_conversations(think_time=ThinkTime(5.0, math.inf))
    first = [r for r in workload if r.after is None]
    later = [r for r in workload if r.after is not None]
    assert [r.arrival for r in first] == [i / 2 for i in range(30)]
    assert 20 < len(later) < 90
    assert all(r.arrival == 5.0 and r.carries_history for r in later)
    assert all(f"{r.request_id.split('-')[0]}-t{int(r.request_id[-1]) - 1}" == r.after for r in later)
    assert len({r.request_id for r in workload}) == len(workload)


def test_prompts_carry_the_history_when_released() -> None:
    workload = make_conversations(count=1, turns=FixedLength(3), system_prompt_len=7, arrivals=BurstArrivals())
    lens = full_prompt_lens(workload)
    feed = RequestFeed(workload)
    spoken: list[int] = []
    for turn in range(3):
        (due,) = feed.pop_due(float(turn))
        assert list(due.prompt_token_ids[: len(spoken)]) == spoken
        assert len(due.prompt_token_ids) == lens[due.request_id]
        answer = [turn] * due.output_len
        spoken = [*due.prompt_token_ids, *answer]
        feed.finish(due.request_id, answer, float(turn + 1))
    assert feed.is_exhausted


def test_system_prompt_is_shared_by_all_conversations() -> None:
    workload = make_conversations(system_prompt_len=8)
    assert len({tuple(r.prompt_token_ids[:8]) for r in workload if r.after is None}) == 1
    assert len({tuple(r.prompt_token_ids[:8]) for r in make_conversations() if r.after is None}) > 20


@pytest.mark.parametrize(("shape", "variation"), [(1.0, 1.0), (4.0, 0.5), (math.inf, 0.0)])
def test_think_times(shape: float, variation: float) -> None:
    times = np.array(ThinkTime(10.0, shape).sample(np.random.default_rng(0), 20_000))
    assert times.mean() == pytest.approx(10, rel=0.03)
    assert times.std() / times.mean() == pytest.approx(variation, rel=0.05)


def test_zero_think_time() -> None:
    assert ThinkTime().sample(np.random.default_rng(0), 2) == [0.0, 0.0]


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


def test_invalid_conversations_are_rejected() -> None:
    with pytest.raises(ConfigError, match="system_prompt_len must be at least 0, got -1"):
        make_conversations(system_prompt_len=-1)
    with pytest.raises(ConfigError, match="mean must be a number of seconds >= 0, got -1"):
        ThinkTime(-1)
    with pytest.raises(ConfigError, match="shape must be positive, got 0"):
        ThinkTime(1, 0)
