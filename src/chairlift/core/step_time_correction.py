"""StepTimeCorrection: the estimated time of steps becomes shorter while steps take less time than estimated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from chairlift.request import Request
from chairlift.step_time import CHUNK_MULTIPLE, StepTime

WINDOW_SECONDS: Final = 60.0
"""Minimum time of the steps that are compared, and thus between two corrections."""

MIN_STEPS: Final = 8
"""Minimum number of these steps."""

MAX_PAIRS: Final = 0.25
"""Steps with a larger part of attention are not compared: layers with a window take less than estimated at any time,
and that would make the other parts of the estimate too short."""

MAX_RATIO: Final = 0.9
"""A larger ratio of measured to estimated seconds changes nothing."""

MIN_RATIO: Final = 0.25
"""One correction makes the estimate at most this much shorter, because longer chunks are not measured yet."""


class StepTimeCorrection:
    """Compares the estimated seconds of steps with the seconds that they take.

    An engine that starts on a busy machine measures long times, which would keep the chunks of prompts short until it
    ends. Therefore the estimate is multiplied by the ratio of measured to estimated seconds of all steps in a window
    that have chunks and hardly any attention. It never becomes longer, because other processes delay steps only for a
    while. The estimates depend on nothing but the recorded steps and their times, so the same records lead to the same
    estimates.

    Args:
        step_time: the estimate at the start.
        apply: is called with each new estimate.
    """

    def __init__(self, step_time: StepTime, apply: Callable[[StepTime], None]) -> None:
        self._step_time = step_time
        self._apply = apply
        self._in_flight: deque[tuple[float, float]] = deque()
        self._start: float | None = None
        self._num_steps, self._estimated, self._measured = 0, 0.0, 0.0

    def record_step(self, requests: Sequence[Request], counts: Collection[int], now: float) -> None:
        """Record a step that is planned with `counts` tokens of these requests. Without a chunk it is not compared."""
        estimated, time, num_tokens = 0.0, self._step_time, sum(counts)
        if num_tokens >= len(counts) + CHUNK_MULTIPLE - 1:
            starts = [request.num_computed_tokens - count for request, count in zip(requests, counts, strict=True)]
            estimated = time.fixed + sum(map(time.chunk_seconds, starts, counts))
            if estimated * (1 - MAX_PAIRS) > time.fixed + time.per_token * num_tokens:
                estimated = 0.0
        self._in_flight.append((now, estimated))

    def record_result(self, now: float) -> StepTime | None:
        """Record the end of the oldest step; returns the new estimate if it has become shorter."""
        scheduled, estimated = self._in_flight.popleft()
        if not estimated:
            return None
        if self._start is None:
            self._start = scheduled
        self._num_steps += 1
        self._estimated += estimated
        self._measured += now - scheduled
        if self._num_steps < MIN_STEPS or now - self._start < WINDOW_SECONDS:
            return None
        ratio = max(MIN_RATIO, self._measured / self._estimated)
        self._start, self._num_steps, self._estimated, self._measured = now, 0, 0.0, 0.0
        if ratio > MAX_RATIO:
            return None
        self._step_time = self._step_time.scaled(ratio)
        self._in_flight = deque((scheduled, 0.0) for scheduled, _estimated in self._in_flight)
        self._apply(self._step_time)
        return self._step_time
