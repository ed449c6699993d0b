"""The estimated time of a step, from which the scheduler derives the sizes of chunks of prompts."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Final

CHUNK_MULTIPLE: Final = 16
"""Chunks that are limited by time have a multiple of this number of tokens, and at least this number."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Estimated seconds of a step: `fixed` + `per_token` for each token + `per_pair` for each token and each token that
    it attends to. Linear layers, and the attention of a long context, which can take more time than they do.

    Attributes:
        decode_target: limit of a step in which a request decodes, in seconds: the time between two of its tokens.
        prefill_target: limit of a step that computes prompts only. No stream is delayed; a new request and an abort
            wait for the end of the step.
    """

    fixed: float
    per_token: float
    per_pair: float
    decode_target: float
    prefill_target: float

    def scaled(self, factor: float) -> StepTime:
        """The estimate for a machine on which each step takes `factor` of this time, with the same limits."""
        parts = {name: factor * getattr(self, name) for name in ("fixed", "per_token", "per_pair")}
        return replace(self, **parts)

    def chunk_seconds(self, start: int, num_tokens: int) -> float:
        """The seconds of `num_tokens` tokens of one request, the first of them at position `start`."""
        return num_tokens * (self.per_token + self.per_pair * (start + num_tokens / 2))

    def largest_chunk(self, start: int, seconds: float) -> int:
        """The largest multiple of CHUNK_MULTIPLE tokens from position `start` on that takes at most `seconds`."""
        if seconds <= 0:
            return 0
        linear, quadratic = self.per_token + self.per_pair * start, self.per_pair / 2
        root = math.sqrt(linear * linear + 4 * quadratic * seconds)
        if 2 * seconds >= sys.maxsize * (linear + root):
            return sys.maxsize
        # This form of the positive root of quadratic * n^2 + linear * n = seconds is exact without attention, too.
        return int(2 * seconds / (linear + root)) // CHUNK_MULTIPLE * CHUNK_MULTIPLE


@dataclass(frozen=True, slots=True)
class RowTime:
    """Estimated seconds of a step that samples a token at each of its rows, by the number of rows.

    Attributes:
        points: measured seconds by number of rows, in ascending order; at least two. Between them the estimate is
            linear, and beyond the last one it has the slope of the last two. A step is never estimated to be faster
            than one with fewer rows.
    """

    points: Mapping[int, float]
    _seconds: list[float] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.points) > 1, "a line needs two points"
        monotone = zip(self.points, accumulate(self.points.values(), max), strict=True)
        for (low, below), (high, above) in pairwise(monotone):
            slope = (above - below) / (high - low)
            if not self._seconds:
                self._seconds.extend(below for _ in range(low))
            self._seconds.extend(below + slope * (rows - low) for rows in range(low, high))
        self._seconds.append(above)

    def seconds(self, num_rows: int) -> float:
        """The estimated seconds of a step with `num_rows` >= 0 rows."""
        known = self._seconds
        last = len(known) - 1
        if num_rows <= last:
            return known[num_rows]
        return known[last] + (known[last] - known[last - 1]) * (num_rows - last)
