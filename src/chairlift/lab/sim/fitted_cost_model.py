"""A cost model learned from the recorded steps of a real run.

    seconds = sum of coefficient * feature, no coefficient negative

Features are those of StepShape, and min(num_tokens, k) for a few k: a matrix product of few rows costs about as much as
of one, since the weights are read once, so the first rows are dear and later ones cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.events import Event, Step
from chairlift.lab.metrics.percentile import percentile
from chairlift.lab.sim.cost_model import StepShape, shape_of

Array = npt.NDArray[np.float64]

KNEES: Final = (2, 4, 8, 16, 32, 64, 128)
FEATURES: Final = ("constant", *StepShape._fields, *(f"min(num_tokens, {knee})" for knee in KNEES))
"""Names of the features, in the order of `_features`."""

MIN_STEPS: Final = 2 * len(FEATURES)
NUM_REWEIGHTINGS: Final = 10


@dataclass(frozen=True, slots=True)
class FitError:
    """How far predictions are from a recorded run, as shares of what was recorded.

    Attributes:
        median, p90: of the absolute errors of single steps.
        total: of the sum of all steps, signed: positive is too long.
    """

    num_steps: int
    median: float
    p90: float
    total: float


@dataclass(frozen=True, slots=True)
class FittedCostModel:
    """A cost model.

    Attributes:
        coefficients: feature (see FEATURES) -> seconds per unit; those that are 0 are left out.
        source: of what the run was recorded.
        error: on the steps that it was fitted to.
    """

    coefficients: dict[str, float]
    source: str
    error: FitError

    def seconds(self, shape: StepShape) -> float:
        features = dict(zip(FEATURES, _features(shape), strict=True))
        return sum(value * features[name] for name, value in self.coefficients.items())

    def constants(self) -> list[tuple[str, str]]:
        error = self.error
        residual = f"median {error.median:.1%}, p90 {error.p90:.1%} a step over {error.num_steps} steps"
        return [
            ("fitted to", self.source),
            ("residual", residual),
            *((name, f"{value * 1e6:.4g} us") for name, value in self.coefficients.items()),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> FittedCostModel:
        """What `to_dict` gave; raises ConfigError saying what is missing or wrong."""
        try:
            coefficients = {str(name): float(value) for name, value in record["coefficients"].items()}
            model = cls(coefficients, str(record["source"]), FitError(**record["error"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a fitted cost model: {error!r}") from None
        if unknown := sorted(coefficients.keys() - set(FEATURES)):
            raise ConfigError(f"a fitted cost model has unknown features {unknown}; known are {', '.join(FEATURES)}")
        if negative := sorted(name for name, value in coefficients.items() if not value >= 0):
            raise ConfigError(f"a fitted cost model has negative coefficients for {negative}")
        return model


def step_seconds(events: Iterable[Event]) -> list[tuple[StepShape, float]]:
    """The shape of each recorded step and the seconds that it took, in order.

    A step is taken to last from the result of the one before it until its own: what lies between two results, planning
    and answering included, is what a request waits for. If nobody was left after the step before, the engine stood
    idle, and the step began when it was planned. That holds for engines that plan ahead as well, where planning and
    result are more than one step apart.
    """
    timed: list[tuple[StepShape, float]] = []
    before: Step | None = None
    for event in events:
        if not isinstance(event, Step):
            continue
        start = event.scheduled_time
        if before is not None and (before.num_waiting or len(before.finished) < before.num_running):
            start = before.time
        if event.time > start:
            timed.append((shape_of(event), event.time - start))
        before = event
    return timed


def fit_cost_model(events: Iterable[Event], source: str = "a recorded run") -> FittedCostModel:
    """Fit the coefficients to a run.

    Errors count relative to what is predicted, as for a quantity whose deviation grows with its mean, so that the sum
    of many steps comes out right; errors of more than the prediction itself (a machine that was busy with something
    else) count linearly instead of squared (Huber, 1964). Both need a prediction first: least squares with weights,
    repeated.

    Raises:
        ConfigError: fewer steps than a fit can be made of.
    """
    timed = step_seconds(events)
    if len(timed) < MIN_STEPS:
        raise ConfigError(f"{source} has {len(timed)} steps, and a cost model is fitted to at least {MIN_STEPS}")
    features = np.array([_features(shape) for shape, _ in timed], dtype=np.float64)
    seconds = np.array([duration for _, duration in timed])
    solution = _weighted(features, seconds, 1 / seconds)
    for _ in range(NUM_REWEIGHTINGS):
        predicted = np.maximum(features @ solution, 0.1 * seconds)
        error = np.abs(seconds - predicted) / predicted
        solution = _weighted(features, seconds, 1 / predicted / np.sqrt(error.clip(min=1.0)))
    coefficients = {name: float(value) for name, value in zip(FEATURES, solution, strict=True) if value > 0}
    return FittedCostModel(coefficients, source, _error(features @ solution, seconds))


def _weighted(features: Array, seconds: Array, weights: Array) -> Array:
    """The coefficients, from columns that were scaled to be alike."""
    matrix = features * weights[:, None]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    solution: Array = non_negative_least_squares(matrix / scale, seconds * weights) / scale
    return solution


def prediction_error(model: FittedCostModel, events: Iterable[Event]) -> FitError:
    """The model's error on a run, better one that it was not fitted to.

    Raises:
        ConfigError: the run has no step.
    """
    timed = step_seconds(events)
    if not timed:
        raise ConfigError("there are no steps to prediction_error a cost model on")
    predicted = np.array([model.seconds(shape) for shape, _ in timed])
    return _error(predicted, np.array([duration for _, duration in timed]))


def _features(shape: StepShape) -> tuple[int, ...]:
    num_tokens = shape.num_tokens
    return (1, *shape, *(min(num_tokens, knee) for knee in KNEES))


def _error(predicted: Array, recorded: Array) -> FitError:
    errors = (np.abs(predicted - recorded) / recorded).tolist()
    total = float(predicted.sum() / recorded.sum() - 1)
    return FitError(len(errors), percentile(errors, 50), percentile(errors, 90), total)


def non_negative_least_squares(matrix: Array, target: Array) -> Array:
    """x >= 0 that minimizes |matrix x - target|, by the active set method of Lawson and Hanson, Solving Least Squares
    Problems (1974), chapter 23.

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
    """Solve for the free coefficients; as long as that makes one negative, go there only as far as none is, and fix the
    one at 0 that stopped it. Changes `is_free`."""
    while True:
        wanted = np.zeros_like(x)
        free = np.flatnonzero(is_free)
        wanted[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
        if not (wanted[free] <= 0).any():
            return wanted
        falling = free[wanted[free] <= 0]
        steps = x[falling] / (x[falling] - wanted[falling]).clip(min=np.finfo(float).tiny)
        x = x + float(steps.min()) * (wanted - x)
        x[falling[steps == steps.min()]] = 0.0
        is_free &= x > 0
        x[~is_free] = 0.0
