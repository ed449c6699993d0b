"""What the presets of the vLLM paper are made of: loads, steady state, curves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.events import Event, EventList, Step
from chairlift.lab.presets.vllm_rates import STEPS_AN_OCTAVE, THRESHOLDS, Point, curve, ratio, sustained_rate
from chairlift.lab.presets.vllm_setting import MAX_MODEL_LEN, Load, cost_model, sim_config
from chairlift.lab.presets.vllm_steady import KINDS, WARM_UP, Spread, SteadyTally
from chairlift.lab.report.memory import true_kinds
from chairlift.lab.sim.simulator import simulate


class Both:
    """Keeps the events and adds them up."""

    def __init__(self, num_requests: int) -> None:
        self.list = EventList()
        self.tally = SteadyTally(num_requests)

    def emit(self, event: Event) -> None:
        self.list.emit(event)
        self.tally.emit(event)


def test_a_load_is_the_same_at_every_rate() -> None:
    load = Load.draw("alpaca", 1, 50)
    slow, fast, burst = load.at_rate(2.0), load.at_rate(8.0, 30), load.saturated()
    assert len(fast) == 30
    assert [r.arrival / 4 for r in slow[:30]] == pytest.approx([r.arrival for r in fast])
    assert {r.arrival for r in burst} == {0.0}
    for requests in (slow, fast, burst):
        lengths = [(len(r.prompt_token_ids), r.output_len) for r in requests]
        assert lengths == load.pairs[: len(requests)]
        assert all(sum(pair) <= MAX_MODEL_LEN for pair in lengths)


@pytest.mark.parametrize("kv", ["max", "pow2", "oracle", "paged"])
def test_steady_state_is_what_the_report_counts_with_the_true_lengths(kv: str) -> None:
    """The counted steps found again, and their slots split again by `report.memory`."""
    load = Load.draw("sharegpt", 2, 150)
    both = Both(150)
    simulate(load.saturated(), sim_config(kv), cost_model(), both)
    steps = [event for event in both.list.events if isinstance(event, Step)]
    seen: set[str] = set()
    counted = []
    for index, step in enumerate(steps):
        seen |= set(step.admitted)
        if WARM_UP * 150 <= len(seen) < 150:
            counted.append(index)
            assert step.num_waiting > 0, "the queue is not empty"
    kinds = true_kinds(both.list.events)
    num_slots = sum(sum(kinds[index]) for index in counted)
    steady = both.tally.result()
    for kind in KINDS:
        share = 100 * sum(getattr(kinds[index], kind) for index in counted) / num_slots
        assert steady.shares[kind] == pytest.approx(share), kind
    assert steady.batch == pytest.approx(sum(steps[i].num_running for i in counted) / len(counted))
    assert steady.saved == 0


def test_a_run_that_admits_all_at_once_has_no_steady_state() -> None:
    tally = SteadyTally(3)
    simulate(Load([(20, 5)] * 3, 0).saturated(), sim_config("paged"), cost_model(), tally)
    with pytest.raises(ConfigError, match="num_prompts=3 is too few"):
        tally.result()


def test_a_spread_is_the_mean_and_the_largest_distance() -> None:
    assert Spread.of([1.0, 2.0, 6.0]) == (3.0, 3.0)


@given(capacity=st.floats(0.3, 20.0))
def test_curves_find_the_rate_at_which_latency_explodes(capacity: float) -> None:
    """Latency of a queue that takes `capacity` requests a second: 0.02 / (1 - load)."""
    asked: list[float] = []

    def latency_at(rate: float) -> float:
        asked.append(rate)
        return 0.02 / (1 - rate / capacity) if rate < capacity else 10.0

    points = curve(latency_at, lowest=0.1, highest=100.0)
    rates = [rate for rate, _ in points]
    assert rates == sorted(set(asked))
    assert len(asked) == len(set(asked)), "no rate is simulated twice"
    step = 2 ** (1 / STEPS_AN_OCTAVE)
    for threshold in THRESHOLDS:
        exact = capacity * (1 - 0.02 / threshold)
        found = sustained_rate(points, threshold)
        assert found is not None
        assert exact / step <= found <= exact * step


def test_a_rate_outside_the_curve_is_unknown() -> None:
    points = [Point(1.0, 0.3), Point(2.0, 0.7)]
    assert sustained_rate(points, 0.2) is None
    assert sustained_rate(points, 0.5) == pytest.approx(1.5)
    assert sustained_rate(points, 0.9) is None
    assert ratio(None, 2.0) is None
    assert ratio(3.0, None) is None
    assert ratio(3.0, 2.0) == 1.5


def test_a_curve_that_never_rises_ends_at_the_highest_rate() -> None:
    points = curve(lambda rate: 0.01, lowest=1.0, highest=3.0)
    assert points[0].rate == 1.0
    assert points[-1].rate == pytest.approx(4.0)
    assert sustained_rate(points, max(THRESHOLDS)) is None
