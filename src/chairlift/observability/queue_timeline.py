"""Why the queue stood, step by step: kept once for everybody who waits in it.

    step        0    1    2    3    4    5    6
    reason      -    -  memory memory memory seats -
    head               r7     r7    r7    r9
    stretches   |---------|---------------|-----|----|

A request that joined before step 3 and was admitted in step 6 waited for steps 3 to 5: a slice of this.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from chairlift.events import RequestWaiting, Step


class Holder(NamedTuple):
    """A request in the batch, and what it held after a schedule. `num_computed`: tokens with K and V, once that step is
    over; `num_left`: tokens that it may still sample after it."""

    request_id: str
    tenant: str
    num_blocks: int
    num_prompt_tokens: int
    max_tokens: int
    output_len: int | None
    num_computed: int
    num_left: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps in which the same head of the queue was refused for the same reason.

    Attributes:
        first_step: of them; the next stretch begins where this one ends.
        reason, head_id, head_tenant: None if nobody waited; "unknown" for steps whose events were lost.
        free_blocks, evictable_blocks, num_running, num_waiting: after the first one's schedule.
        refusal: the arithmetic of the head, if it was told.
        holders: the batch, the one that holds most first.
    """

    first_step: int
    reason: str | None
    head_id: str | None = None
    head_tenant: str = ""
    free_blocks: int = 0
    evictable_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    refusal: RequestWaiting | None = None
    holders: tuple[Holder, ...] = ()


UNKNOWN = "unknown"


class QueueTimeline:
    """Stretches, and the time at which every step was planned."""

    def __init__(self) -> None:
        self.next_step = 0
        self._first_step = 0
        self._times = array("d")
        self._stretches: list[Stretch] = []

    def begin(self, step: Step) -> bool:
        """Take in the next step's time; returns whether a stretch begins with it, which is then to be added.

        Steps that are missing are told as unknown, and taken to have been planned when this one was.
        """
        if not self._times:
            self._first_step = self.next_step = step.step
        missing = step.step - self.next_step
        if missing > 0:
            self._stretches.append(Stretch(self.next_step, UNKNOWN))
            self._times.extend([step.scheduled_time] * missing)
        self._times.append(step.scheduled_time)
        self.next_step = step.step + 1
        last = self._stretches[-1] if self._stretches else None
        return last is None or (last.reason, last.head_id) != (step.wait_reason, step.head_id)

    def add(self, stretch: Stretch) -> None:
        self._stretches.append(stretch)

    def time_of(self, step: int) -> float | None:
        """When it was planned; None: not yet, or not known any more."""
        index = step - self._first_step
        return self._times[index] if 0 <= index < len(self._times) else None

    def slice(self, first: int, end: int) -> Iterator[tuple[int, int, Stretch]]:
        """(first step, end, stretch) for the steps from `first` up to `end`, as far as they are known."""
        end = min(end, self.next_step)
        at = max(0, bisect_right(self._stretches, first, key=lambda stretch: stretch.first_step) - 1)
        stretches = list(islice(self._stretches, at, None))
        for index, stretch in enumerate(stretches):
            if stretch.first_step >= end:
                return
            until = stretches[index + 1].first_step if index + 1 < len(stretches) else self.next_step
            begin = max(first, stretch.first_step)
            if begin < min(until, end):
                yield begin, min(until, end), stretch

    def forget_before(self, step: int) -> None:
        """Nobody will ask for earlier steps any more."""
        step = min(step, self.next_step)
        if (count := step - self._first_step) <= 0:
            return
        del self._times[:count]
        self._first_step = step
        keep = bisect_right(self._stretches, step, key=lambda stretch: stretch.first_step) - 1
        del self._stretches[: max(0, keep)]
