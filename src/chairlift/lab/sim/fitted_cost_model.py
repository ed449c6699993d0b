"""A cost model that is fitted to the recorded steps of a real run.

    seconds = sum of coefficient * feature, where no coefficient is negative

The features are the fields of StepShape, and min(num_tokens, k) for several k: the weights are read once for a matrix
product, so the first rows cost more than further ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.events import Event, Step
from chairlift.lab.sim.cost_model import StepShape, recorded_shape
from chairlift.observability.step_cost import seconds_of_step

Array = npt.NDArray[np.float64]

KNEES: Final = (2, 4, 8, 16, 32, 64, 128)
FEATURES: Final = ("constant", *StepShape._fields, *(f"min(num_tokens, {knee})" for knee in KNEES))
"""The names of the features, in the order of `_features`."""

MIN_STEPS: Final = 2 * len(FEATURES)
NUM_REWEIGHTINGS: Final = 10


@dataclass(frozen=True, slots=True)
class FitError:
    """The errors of predicted durations, as shares of the recorded ones.

    Attributes:
        num_steps: number of compared steps.
        median, p90: of the absolute errors of single steps.
        total: the signed error of the sum of all steps; positive if the prediction is too long.
    """

    num_steps: int
    median: float
    p90: float
    total: float


@dataclass(frozen=True, slots=True)
class FittedCostModel:
    """A cost model that is linear in the features of a step.

    Attributes:
        coefficients: seconds per unit of each feature (see FEATURES), without zeros.
        source: the name of the recorded run.
        error: on the steps of that run.
    """

    coefficients: dict[str, float]
    source: str
    error: FitError

    def seconds(self, shape: StepShape) -> float:
        features = dict(zip(FEATURES, _features(shape), strict=True))
        return sum(value * features[name] for name, value in self.coefficients.items())

    def constants(self) -> list[tuple[str, str]]:
        """Returns the source, the error and the coefficients as (name, value with unit), to be printed with results."""
        error = self.error
        residual = f"median {error.median:.1%}, p90 {error.p90:.1%} per step over {error.num_steps} steps"
        return [
            ("fitted to", self.source),
            ("residual", residual),
            *((name, f"{value * 1e6:.4g} us") for name, value in self.coefficients.items()),
        ]


def step_seconds(events: Iterable[Event]) -> list[tuple[StepShape, float]]:
    """Returns the shape and the duration in seconds of each recorded step, in order.

    A step lasts from the result of the step before it until its own result, because requests wait for scheduling and
    output processing too. If no request remained after the step before, the engine was idle, and the step starts when
    it is scheduled. This also holds for engines that schedule several steps ahead.
    """
    steps = [event for event in events if isinstance(event, Step)]
    timed = ((step, seconds_of_step(step, before)) for step, before in zip(steps, [None, *steps], strict=False))
    return [(recorded_shape(step), seconds) for step, seconds in timed if seconds > 0]


def fit_cost_model(events: Iterable[Event], source: str = "a recorded run") -> FittedCostModel:
    """Fits a cost model to the steps of a run, by least squares with weights that are updated in several rounds.

    Errors are relative to the predicted duration, as for a quantity whose deviation grows with its mean, so the sum of
    many steps is unbiased. Errors larger than the prediction, as on a machine with other load, count linearly, not
    squared (Huber, 1964).

    Raises:
        ConfigError: the run has fewer than MIN_STEPS steps.
    """
    timed = step_seconds(events)
    if len(timed) < MIN_STEPS:
        raise ConfigError(f"{source} has {len(timed)} steps, but fitting a cost model needs at least {MIN_STEPS}")
    features = np.array([_features(shape) for shape, _ in timed], dtype=np.float64)
    seconds = np.array([duration for _, duration in timed])
    solution = _weighted(features, seconds, 1 / seconds)
    for _ in range(NUM_REWEIGHTINGS):
        predicted = np.maximum(features @ solution, 0.1 * seconds)
        error = np.abs(seconds - predicted) / predicted
        solution = _weighted(features, seconds, 1 / predicted / np.sqrt(error.clip(min=1.0)))
    coefficients = {name: float(value) for name, value in zip(FEATURES, solution, strict=True) if value > 0}
    return FittedCostModel(coefficients, source, fit_error(features @ solution, seconds))


def _weighted(features: Array, seconds: Array, weights: Array) -> Array:
    """Returns the coefficients of the weighted problem, solved with columns of equal norm."""
    matrix = features * weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution: Array = non_negative_least_squares(matrix / scale, seconds * weights) / scale
    return solution


def _features(shape: StepShape) -> tuple[int, ...]:
    num_tokens = shape.num_tokens
    return (1, *shape, *(min(num_tokens, knee) for knee in KNEES))


def fit_error(predicted: Array, recorded: Array) -> FitError:
    """The errors of predicted seconds of steps."""
    errors = (np.abs(predicted - recorded) / recorded).tolist()
    total = float(predicted.sum() / recorded.sum() - 1)
    p50, p90 = np.percentile(errors, (50, 90)).tolist()
    return FitError(len(errors), p50, p90, total)


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """Returns x >= 0 that minimizes |matrix x - target|.

    Source: the active set method of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.

    Args:
        matrix: [rows, columns], rows >= 1; target: [rows].

    Returns:
        [columns].
    """
    num_columns = matrix.shape[1]
    gram, moment = matrix.T @ matrix, matrix.T @ target
    tolerance = 1e-12 * max(1.0, float(np.abs(moment).max(initial=0.0)))
    x = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=bool)
    for _ in range(3 * num_columns):
        gain = np.where(is_free, -np.inf, moment - gram @ x)
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        is_free[best] = True
        x = _descend(gram, moment, x, is_free)
    return x


def _descend(gram: Array, moment: Array, x: Array, is_free: npt.NDArray[np.bool_]) -> Array:
    """Solves for the free coefficients, and updates `is_free`.

    While the solution has a negative coefficient, x moves towards it until a coefficient reaches 0 and is fixed.
    """
    while True:
        solution = np.zeros_like(x)
        free = np.flatnonzero(is_free)
        solution[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
        if not (solution[free] <= 0).any():
            return solution
        falling = free[solution[free] <= 0]
        steps = x[falling] / (x[falling] - solution[falling]).clip(min=np.finfo(float).tiny)
        x = x + float(steps.min()) * (solution - x)
        x[falling[steps == steps.min()]] = 0.0
        is_free &= x > 0
        x[~is_free] = 0.0
