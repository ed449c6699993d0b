"""How long until a request that waits is admitted."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Member(NamedTuple):
    """A request in the batch: steps until it ends, and blocks that it then gives back."""

    steps_left: int
    num_blocks: int


class Next(NamedTuple):
    """A request in the queue: blocks that it needs, and steps that it will take."""

    needed: int
    num_steps: int


def steps_until_admitted(
    batch: Iterable[Member], queue: Sequence[Next], free_blocks: int, free_seats: int
) -> int | None:
    """Steps until the last one of the queue is admitted; None if that cannot be said.

    Everybody is taken to run as long as told, to give back then what it holds now, and to be admitted in the order of
    the queue. Memory that the batch will yet grow into is not counted.
    """
    ends = [(member.steps_left, member.num_blocks) for member in batch]
    heapq.heapify(ends)
    step = 0
    for entry in queue:
        while free_seats < 1 or free_blocks < entry.needed:
            if not ends:
                return None
            step, num_blocks = heapq.heappop(ends)
            free_blocks += num_blocks
            free_seats += 1
        free_seats -= 1
        free_blocks -= entry.needed
        heapq.heappush(ends, (step + entry.num_steps, entry.needed))
    return step
