"""How long until a request that waits is admitted, or one that stands has a seat."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Member(NamedTuple):
    """A request in the batch: steps until it ends once it has a seat, and blocks that it then gives back."""

    steps_left: int
    num_blocks: int


class Next(NamedTuple):
    """A request in the queue: blocks that it needs, and steps that it will take."""

    needed: int
    num_steps: int


def steps_until_seated(seated: Iterable[Member], standing: Sequence[Member]) -> int | None:
    """Steps until the last one of those who stand has a seat; all seats are taken."""
    return steps_until_admitted(seated, [Next(0, member.steps_left) for member in standing], 0, 0)


def steps_until_admitted(
    batch: Iterable[Member],
    queue: Sequence[Next],
    free_blocks: int,
    free_seats: int,
    standing: Iterable[Member] = (),
) -> int | None:
    """Steps until the last one of the queue is admitted; None if that cannot be said.

    Everybody is taken to run as long as told, to give back then what it holds now, and to be admitted in the order of
    the queue. Memory that the batch will yet grow into is not counted.

    Args:
        batch: those with a seat; standing: those ahead of one, each of whom leaves its place to the queue when it has
            one. Other places ahead of a seat were refused to the head of the queue, and still are.
    """
    ends = list(batch)
    heapq.heapify(ends)
    stands = deque(standing)
    step = free_ahead = 0
    for entry in queue:
        while free_seats + free_ahead < 1 or free_blocks < entry.needed:
            if not ends:
                return None
            step, num_blocks = heapq.heappop(ends)
            free_blocks += num_blocks
            if stands:
                heapq.heappush(ends, _from(step, stands.popleft()))
                free_ahead += 1
            else:
                free_seats += 1
        free_blocks -= entry.needed
        member = Member(entry.num_steps, entry.needed)
        if free_seats:
            free_seats -= 1
            heapq.heappush(ends, _from(step, member))
        else:
            free_ahead -= 1
            stands.append(member)
    return step


def _from(step: int, member: Member) -> Member:
    return member._replace(steps_left=step + member.steps_left)
