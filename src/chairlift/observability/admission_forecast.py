"""Forecasts in how many steps a waiting request is admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class RunningForecast(NamedTuple):
    """A running request: the number of steps until it ends, and the number of blocks that it frees then."""

    steps_left: int
    num_blocks: int


class QueuedForecast(NamedTuple):
    """A queued request: the number of blocks that it needs, and the number of steps that it will run."""

    num_blocks: int
    num_steps: int


def steps_until_admitted(
    batch: Iterable[RunningForecast], queue: Sequence[QueuedForecast], free_blocks: int, free_seats: int
) -> int | None:
    """The number of steps until the last request of the queue is admitted; None if it never fits.

    Requests are assumed to be admitted in the order of the queue and to hold the same blocks until they end. Blocks
    that running requests will still allocate are not counted.
    """
    ends = [(request.steps_left, request.num_blocks) for request in batch]
    heapq.heapify(ends)
    step = 0
    for queued in queue:
        while free_seats < 1 or free_blocks < queued.num_blocks:
            if not ends:
                return None
            step, num_blocks = heapq.heappop(ends)
            free_blocks += num_blocks
            free_seats += 1
        free_seats -= 1
        free_blocks -= queued.num_blocks
        heapq.heappush(ends, (step + queued.num_steps, queued.num_blocks))
    return step
