"""Fitted cost models: the solver compared with scipy's, and recorded steps with known costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls
from sim_workloads import request, small_config

from chairlift.errors import ConfigError
from chairlift.events import Event, EventList, Step
from chairlift.lab.sim.cost_model import StepShape, recorded_shape
from chairlift.lab.sim.fitted_cost_model import (
    FEATURES,
    FitError,
    FittedCostModel,
    fit_cost_model,
    fit_error,
    non_negative_least_squares,
    step_seconds,
)
from chairlift.lab.sim.simulator import simulate


class KneeCost:
    """Costs 1 ms per step, 0.5 ms for each of the first four tokens, 10 us per token and 2 us per pair."""

    def seconds(self, shape: StepShape) -> float:
        return 1e-3 + 5e-4 * min(shape.num_tokens, 4) + 1e-5 * shape.num_tokens + 2e-6 * shape.num_pairs


def recorded(seed: int, gap: float = 0.004) -> list[Event]:
    """Returns the events of a run with that cost model, with bursts and pauses."""
    rng = random.Random(seed)
    requests, time = [], 0.0
    for index in range(60):
        time += rng.choice([0.0, gap, 0.2])
        requests.append(request(f"r{index}", time, rng.randint(1, 30), rng.randint(1, 25), first=index))
    events = EventList()
    simulate(requests, small_config(), KneeCost(), events)
    return events.events


def step(number: int, start: float, end: float, **fields: object) -> Step:
    happened = {"finished": [], "num_running": 1, "num_waiting": 0, **fields}
    return Step(
        end, number, start, ["a"], [1], [number], [1], admitted=[], preempted=[], free_blocks=0, evictable_blocks=0,
        **happened,
    )  # type: ignore[arg-type]  # fmt: skip


@settings(deadline=None)
@given(st.integers(1, 25), st.integers(1, 9), st.integers(0, 2**32), st.booleans())
def test_solver_is_as_good_as_scipy(rows: int, columns: int, seed: int, is_degenerate: bool) -> None:
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    if is_degenerate:
        matrix[:, -1] = matrix[:, 0]
    found = non_negative_least_squares(matrix, target)
    assert (found >= 0).all()
    best, _ = nnls(matrix, target)
    assert np.linalg.norm(matrix @ found - target) <= np.linalg.norm(matrix @ best - target) + 1e-8


def prediction_error(model: FittedCostModel, events: Iterable[Event]) -> FitError:
    """The error of the model on a run, which should not be the one that it was fitted to."""
    timed = step_seconds(events)
    predicted = np.array([model.seconds(shape) for shape, _ in timed])
    return fit_error(predicted, np.array([duration for _, duration in timed]))


def test_known_costs_are_recovered() -> None:
    model = fit_cost_model(recorded(seed=1))
    assert model.error.p90 < 1e-6
    assert set(model.coefficients) <= set(FEATURES)
    assert model.coefficients["min(num_tokens, 4)"] == pytest.approx(5e-4, rel=1e-3)
    held_out = prediction_error(model, recorded(seed=2))
    assert held_out.num_steps > 100
    assert held_out.median < 1e-6
    assert abs(held_out.total) < 1e-6


def disturbed(events: list[Event], factor: Callable[[], float]) -> list[Event]:
    """Returns the steps as if the engine was idle before each of them, with durations multiplied by a factor."""
    changed: list[Event] = []
    for event in events:
        if isinstance(event, Step):
            seconds = (event.time - event.scheduled_time) * factor()
            event = replace(event, scheduled_time=0.0, time=seconds, num_waiting=0, num_running=len(event.finished))
        changed.append(event)
    return changed


def test_noise_increases_the_error_of_steps_but_not_of_the_total() -> None:
    rng = random.Random(0)
    model = fit_cost_model(disturbed(recorded(seed=1, gap=0.2), lambda: rng.choice([0.6, 1.4])), "a noisy run")
    assert 0.28 < model.error.median < 0.67, "0.4 of 1.4 to 0.4 of 0.6"
    assert abs(model.error.total) < 0.02
    assert dict(model.constants())["fitted to"] == "a noisy run"


def test_a_few_long_steps_do_not_change_the_fit() -> None:
    rng = random.Random(0)
    events = recorded(seed=1, gap=0.2)
    model = fit_cost_model(disturbed(events, lambda: 50.0 if rng.random() < 0.02 else 1.0))
    assert abs(prediction_error(model, disturbed(events, lambda: 1.0)).total) < 0.1


def test_step_lasts_from_the_result_before_it() -> None:
    """The second step was scheduled ahead. Before the third the engine was idle; before the fourth a request waited.
    The last step has no measurable duration."""
    events = [
        step(0, 1.0, 2.0),
        step(1, 1.5, 4.0, finished=["a"]),
        step(2, 9.0, 10.0, finished=["a"], num_waiting=1),
        step(3, 10.5, 11.0),
        step(4, 11.0, 11.0),
    ]
    assert step_seconds(events) == [
        (recorded_shape(event), seconds) for event, seconds in zip(events, [1.0, 2.0, 1.0, 1.0], strict=False)
    ]


def test_too_few_steps_are_an_error() -> None:
    with pytest.raises(ConfigError, match="x has 1 steps, but fitting a cost model needs at least"):
        fit_cost_model([step(0, 0.0, 1.0)], "x")
