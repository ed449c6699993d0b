"""Other arrivals, and only what fits."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift.lab.workload.arrivals import Constant
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.transform import fitting, with_arrivals


def request(request_id: str, prompt_len: int, output_len: int = 2, **changes: Any) -> WorkloadRequest:
    return WorkloadRequest(
        request_id, **{"arrival": 9.0, "prompt_token_ids": bytes(prompt_len), **changes}, output_len=output_len
    )


def test_other_arrivals() -> None:
    turn = request("t", 1, arrival=0.5, after="a")
    moved = with_arrivals([request("a", 1), turn, request("b", 1)], Constant(4.0), np.random.default_rng(0))
    assert [r.arrival for r in moved] == [0.0, 0.5, 0.25]
    assert moved[1] is turn


def test_what_fits() -> None:
    workload = [
        request("t2", 1, after="t1", carries_history=True),
        request("fits", 8),
        request("long", 9),
        request("t1", 7),
        request("declares", 8, max_tokens=3),
        request("after-long", 1, after="long"),
        request("t3", 1, after="t2"),
        request("fresh", 1, after="t1"),
    ]
    assert [r.request_id for r in fitting(workload, 10)] == ["fits", "t1", "fresh"]
    assert fitting(workload, 12) == workload
