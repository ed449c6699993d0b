"""The check of `bench compare` that all policies compute equally fast."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.events import EngineStarted, RequestArrived, Step
from chairlift.lab.bench.compare_tables import speed_line
from chairlift.lab.bench.comparison_result import MIN_STEPS, SpeedCheck, SpeedDifference, step_speeds
from chairlift.lab.report.trace import trace_events


def test_step_speeds_include_padding_and_exclude_prefills() -> None:
    started = EngineStarted(0.0, "m", 4, 16, 8, 32, 64, "fcfs", "max", False, batching="static", static_batch_size=2)
    arrivals = [RequestArrived(0.0, request_id, 3, 5) for request_id in "ab"]

    def step(number: int, start: float, end: float, scheduled: list[int], padding: list[int]) -> Step:
        admitted = ["a", "b"] if number == 0 else []
        return Step(end, number, start, ["a", "b"], scheduled, [0, 0], [1, 1], admitted, [], [], 2, 0, 9, 0, padding)

    steps = [step(0, 0.0, 2.0, [3, 3], []), step(1, 2.0, 2.5, [1, 1], []), step(2, 2.5, 3.5, [1, 0], [0, 1])]
    assert step_speeds(trace_events([started, *arrivals, *steps])) == {2: [4.0, 2.0]}


def test_speeds_are_compared_where_two_policies_have_enough_steps() -> None:
    many, few = [10.0] * MIN_STEPS, [1.0] * (MIN_STEPS - 1)
    check = SpeedCheck.from_steps(
        {"a": [{4: many, 2: many}, {8: many}], "b": [{4: [11.0] * (MIN_STEPS - 1), 2: few}, {4: [11.0]}]}
    )
    assert list(check.speeds) == [4]
    assert check.largest == SpeedDifference(4, pytest.approx(0.1))
    assert "yes, largest difference 10.0%, with 4 rows" in speed_line(check)
    assert SpeedCheck.from_steps({"a": [{1: many}], "b": [{2: many}]}).largest is None
    assert "NO, largest difference 50.0%" in speed_line(
        SpeedCheck.from_steps({"a": [{4: many}], "b": [{4: [15.0] * MIN_STEPS}]})
    )


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.floats(1, 100), max_size=30), min_size=1))
def test_the_largest_difference_is_computed_from_the_medians(values: Mapping[str, list[float]]) -> None:
    medians = [median(speeds) for speeds in values.values() if len(speeds) >= MIN_STEPS]
    largest = SpeedCheck.from_steps({name: [{3: speeds}] for name, speeds in values.items()}).largest
    if len(medians) < 2:
        assert largest is None
    else:
        assert largest == SpeedDifference(3, max(medians) / min(medians) - 1)
