"""What a step costs by its tokens, learned while an engine runs."""

from __future__ import annotations

from typing import Final

from chairlift.events import Step

DECAY: Final = 0.998
"""Weight of a step in relation to the next one: the last 500 steps or so count."""

MIN_STEPS: Final = 8


class StepCost:
    """A line through the steps that were observed, the later ones counting more: seconds = base + per_token * tokens,
    neither negative. Least squares, kept as five sums."""

    def __init__(self) -> None:
        self._count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step took so long; padding is tokens too."""
        self._count += 1
        x = float(num_tokens)
        self._weight = DECAY * self._weight + 1
        self._x = DECAY * self._x + x
        self._y = DECAY * self._y + seconds
        self._xx = DECAY * self._xx + x * x
        self._xy = DECAY * self._xy + x * seconds

    def line(self) -> tuple[float, float] | None:
        """(base, per_token); None before MIN_STEPS steps, or while all were alike."""
        spread = self._weight * self._xx - self._x * self._x
        if self._count < MIN_STEPS or spread <= 1e-9 * self._weight * self._xx:
            return None
        slope = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
        base = (self._y - slope * self._x) / self._weight
        if base < 0:
            return 0.0, self._xy / self._xx
        return base, slope

    def seconds(self, num_tokens: int) -> float | None:
        """Of a step with so many tokens; the mean if all were alike; None before MIN_STEPS steps, since the first ones
        are slower than what comes."""
        if (line := self.line()) is not None:
            base, per_token = line
            return base + per_token * num_tokens
        return self._y / self._weight if self._count >= MIN_STEPS else None


class StepTimer:
    """Seconds of each step: from the result before it to its own; from when it was planned if the engine was idle."""

    def __init__(self) -> None:
        self._before: Step | None = None

    def seconds(self, step: Step) -> float:
        """Of the next step, in order."""
        before, self._before = self._before, step
        start = step.scheduled_time
        if before is not None and (before.num_waiting or len(before.finished) < before.num_running):
            start = before.time
        return max(0.0, step.time - start)
