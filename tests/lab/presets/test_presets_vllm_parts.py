"""Shared parts of the presets of the vLLM paper: requests, steady state and latency curves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.events import EventBroadcaster, EventList, Step
from chairlift.lab.presets.capacity import at_rate
from chairlift.lab.presets.vllm_experiments import (
    MAX_MODEL_LEN,
    WARM_UP_SHARE,
    SeedStatistics,
    SteadyStateTally,
    cost_model,
    draw_requests,
    sim_config,
)
from chairlift.lab.presets.vllm_fig12 import STEPS_PER_OCTAVE, THRESHOLDS, RatePoint, latency_curve, sustained_rate
from chairlift.lab.report.memory import true_kinds
from chairlift.lab.report.trace import trace_events
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.observability.tracker import SLOT_KINDS


def test_requests_are_the_same_at_every_rate() -> None:
    requests = draw_requests("alpaca", 1, 50)
    slow, fast, burst = at_rate(requests, 2.0), at_rate(requests, 8.0), at_rate(requests, math.inf)
    assert [r.arrival / 4 for r in slow] == pytest.approx([r.arrival for r in fast])
    assert {r.arrival for r in burst} == {0.0}
    assert all(len(r.prompt_token_ids) + r.output_len <= MAX_MODEL_LEN for r in requests)
    assert draw_requests("alpaca", 1, 50) == requests


@pytest.mark.parametrize("kv", ["max", "pow2", "oracle", "paged"])
def test_steady_state_equals_the_report_with_true_lengths(kv: str) -> None:
    """Finds the counted steps in the events, and computes their slots with `report.memory`."""
    requests = at_rate(draw_requests("sharegpt", 2, 150), math.inf)
    events, tally = EventList(), SteadyStateTally(150)
    simulate(requests, sim_config(kv), cost_model(), EventBroadcaster(events, tally))
    steps = [event for event in events.events if isinstance(event, Step)]
    seen: set[str] = set()
    counted = []
    for index, step in enumerate(steps):
        seen |= set(step.admitted)
        if WARM_UP_SHARE * 150 <= len(seen) < 150:
            counted.append(index)
            assert step.num_waiting > 0, "the queue is not empty"
    kinds = true_kinds(trace_events(events.events))
    num_slots = sum(sum(kinds[index]) for index in counted)
    steady = tally.result()
    for kind in SLOT_KINDS:
        share = 100 * sum(getattr(kinds[index], kind) for index in counted) / num_slots
        assert steady.shares[kind] == pytest.approx(share), kind
    assert steady.batch == pytest.approx(sum(steps[i].num_running for i in counted) / len(counted))
    assert steady.saved == 0


def test_run_that_admits_all_at_once_has_no_steady_state() -> None:
    tally = SteadyStateTally(3)
    simulate([WorkloadRequest(f"r{i}", 0.0, bytes(20), 5) for i in range(3)], sim_config("paged"), cost_model(), tally)
    with pytest.raises(ConfigError, match="num_prompts=3 is too small"):
        tally.result()


def test_seed_statistics_are_mean_and_largest_deviation() -> None:
    assert SeedStatistics.from_values([1.0, 2.0, 6.0]) == (3.0, 3.0)


@given(capacity=st.floats(0.3, 20.0))
def test_curves_contain_the_rate_at_which_latency_rises(capacity: float) -> None:
    """The latency of a queue with a capacity in requests per second is 0.02 / (1 - load)."""
    simulated: list[float] = []

    def latency_at(rate: float) -> float:
        simulated.append(rate)
        return 0.02 / (1 - rate / capacity) if rate < capacity else 10.0

    points = latency_curve(latency_at, lowest=0.1, highest=100.0)
    rates = [rate for rate, _ in points]
    assert rates == sorted(set(simulated))
    assert len(simulated) == len(set(simulated)), "no rate is simulated twice"
    step = 2 ** (1 / STEPS_PER_OCTAVE)
    for threshold in THRESHOLDS:
        exact = capacity * (1 - 0.02 / threshold)
        found = sustained_rate(points, threshold)
        assert found is not None
        assert exact / step <= found <= exact * step


def test_a_rate_outside_the_curve_is_unknown() -> None:
    points = [RatePoint(1.0, 0.3), RatePoint(2.0, 0.7)]
    assert sustained_rate(points, 0.2) is None
    assert sustained_rate(points, 0.5) == pytest.approx(1.5)
    assert sustained_rate(points, 0.9) is None


def test_a_curve_that_never_rises_ends_at_the_highest_rate() -> None:
    points = latency_curve(lambda rate: 0.01, lowest=1.0, highest=3.0)
    assert points[0].rate == 1.0
    assert points[-1].rate == pytest.approx(4.0)
    assert sustained_rate(points, max(THRESHOLDS)) is None
