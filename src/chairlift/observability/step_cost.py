"""The time of a step as a linear function of its tokens, fitted to the steps of a running engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift.events import Step

DECAY: Final = 0.998
"""Weight of a step relative to the next one, so that about the last 500 steps determine the line."""

MIN_STEPS: Final = 8
"""Before this number of steps nothing is estimated, because the first steps are slower than later ones."""


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds of a step: base + per_token * tokens."""

    base: float
    per_token: float


class StepCost:
    """A least-squares fit of the seconds of steps to their tokens. Later steps have more weight."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add a step with this number of tokens, including padding."""
        self._count += 1
        x = float(num_tokens)
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * seconds

    def line(self) -> CostLine | None:
        """The line, whose values are not negative; None before MIN_STEPS steps or if all steps have equal tokens."""
        spread = self._weight * self._xx - self._x * self._x
        if self._count < MIN_STEPS or spread <= 1e-9 * self._weight * self._xx:
            return None
        slope = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
        base = (self._y - slope * self._x) / self._weight
        if base < 0:
            return CostLine(0.0, self._xy / self._xx)
        return CostLine(base, slope)

    def seconds(self, num_tokens: int) -> float | None:
        """Seconds of a step with this number of tokens: from the line, otherwise the mean; None before MIN_STEPS."""
        if (line := self.line()) is not None:
            return line.base + line.per_token * num_tokens
        return self._y / self._weight if self._count >= MIN_STEPS else None


def seconds_of_step(step: Step, before: Step | None) -> float:
    """The seconds of a step from the result of the one before it, or from its own schedule if the engine was idle."""
    start = step.scheduled_time
    if before is not None and (before.num_waiting or len(before.finished) < before.num_running):
        start = before.time
    return max(0.0, step.time - start)
