"""The search for the highest rate, and the measurement of simulated runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.config import SchedulerConfig
from chairlift.lab.metrics.requests import RequestMetrics
from chairlift.lab.presets.capacity import at_rate, highest_rate, measure, num_kv_slots
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.request import WorkloadRequest


@given(threshold=st.floats(0.01, 100), start=st.floats(0.2, 5), tolerance=st.floats(0.01, 0.5))
def test_highest_rate_is_found_within_the_tolerance(threshold: float, start: float, tolerance: float) -> None:
    tried: list[float] = []

    def is_met(rate: float) -> bool:
        tried.append(rate)
        return rate <= threshold

    rate = highest_rate(is_met, start, tolerance)
    assert rate in tried
    assert rate <= threshold < rate * (1 + tolerance) * (1 + 1e-9)
    assert len(tried) == len(set(tried)), "no rate is tried twice"


def test_unreachable_rates_are_zero_or_infinity() -> None:
    assert highest_rate(lambda rate: False, 1.0) == 0.0
    assert highest_rate(lambda rate: True, 1.0) == math.inf


def test_kv_slots_fill_the_memory_beside_the_weights() -> None:
    """90 % of two devices of 80 GB, less 67.9 GB of weights, in slots of 245,760 bytes."""
    model = model_shape("yi-34b")
    assert num_kv_slots(model, DEVICES["A100-80GB"], 2) == (144 * 10**9 - model.weight_bytes) // 245_760
    with pytest.raises(AssertionError, match="does not fit"):
        num_kv_slots(model_shape("gpt3-175b"), DEVICES["A100-40GB"], 8)


def requests() -> list[WorkloadRequest]:
    return [WorkloadRequest(f"r{index}", float(index), [index] * 8, 4) for index in range(3)]


def test_at_rate_changes_arrivals_only() -> None:
    fast = at_rate(requests(), 4.0)
    assert [r.arrival for r in fast] == [0.0, 0.25, 0.5]
    assert [(r.request_id, r.prompt_token_ids) for r in fast] == [
        (r.request_id, r.prompt_token_ids) for r in requests()
    ]


def test_measure_returns_all_requests_and_rejects_none() -> None:
    model = model_shape("opt-13b")
    config = SimConfig(SchedulerConfig(max_model_len=64), num_blocks=16, model=model)
    cost_model = Roofline(model, DEVICES["A100-40GB"])
    finished: list[RequestMetrics] = []
    metrics = measure(requests(), config, cost_model, finished)
    assert metrics.num_answered == len(finished) == 3
    assert measure(requests(), config, cost_model) == metrics
    too_long = [WorkloadRequest("long", 0.0, [0] * 64, 4)]
    with pytest.raises(AssertionError, match="max_model_len"):
        measure(too_long, config, cost_model)
