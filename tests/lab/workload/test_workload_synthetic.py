"""Synthetic workloads: reproducible from the seed, with separate random streams."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess
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


def test_requests_depend_on_the_seed_only() -> None:
    assert make() == make()
    assert prompts(make()) != prompts(make(seed=6))


def test_changing_one_distribution_keeps_the_other_draws() -> None:
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
