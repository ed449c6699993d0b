"""Workloads with a shared prefix."""

from __future__ import annotations

from typing import Any

from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload


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
