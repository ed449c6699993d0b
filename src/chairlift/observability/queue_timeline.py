"""The reason why the queue was blocked in each step, recorded once for all waiting requests.

    step        0    1    2    3    4    5    6
    reason      -    -  memory memory memory seats -
    head               r7     r7    r7    r9
    intervals   |---------|---------------|-----|----|

A request that joined before step 3 and was admitted in step 6 waited for the reasons of steps 3 to 5.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from chairlift.events import RequestArrived, RequestWaiting, Step


class BlockHolder(NamedTuple):
    """A running request and its progress after the schedule of a step.

    Attributes:
        num_computed: number of tokens that have K and V after the step.
        num_left: maximum number of tokens that it samples after the step.
    """

    arrived: RequestArrived
    num_blocks: int
    num_computed: int
    num_left: int


@dataclass(frozen=True, slots=True)
class QueueInterval:
    """Consecutive steps in which the same head of the queue was not admitted for the same reason.

    Attributes:
        first_step: the first of these steps; the next interval begins where this one ends.
        reason: why the head was not admitted; None if the queue was empty, "unknown" for steps whose events were lost.
        head_id, head_tenant: None and "" if the queue was empty or events were lost.
        free_blocks, evictable_blocks, num_running, num_waiting: counts after the schedule of the first step.
        waiting_event: the last event of the head with its needed blocks, if there was one.
        holders: the running requests, in descending order of their blocks.
    """

    first_step: int
    reason: str | None
    head_id: str | None = None
    head_tenant: str = ""
    free_blocks: int = 0
    evictable_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_event: RequestWaiting | None = None
    holders: tuple[BlockHolder, ...] = ()


UNKNOWN = "unknown"


class QueueTimeline:
    """The intervals of the queue, and the time at which each step was scheduled.

    Attributes:
        first_step, next_step: the recorded steps are those from `first_step` to `next_step` - 1.
    """

    def __init__(self) -> None:
        self.next_step = 0
        self.first_step = 0
        self._times = array("d")
        self._intervals: list[QueueInterval] = []

    def add_step(self, step: Step) -> bool:
        """Add the time of the next step; returns whether an interval begins with it, which must then be added.

        Missing steps become an interval of unknown reason. They get the time of this step.
        """
        if not self._times:
            self.first_step = self.next_step = step.step
        missing = step.step - self.next_step
        if missing > 0:
            self._intervals.append(QueueInterval(self.next_step, UNKNOWN))
            self._times.extend([step.scheduled_time] * missing)
        self._times.append(step.scheduled_time)
        self.next_step = step.step + 1
        last = self._intervals[-1] if self._intervals else None
        return last is None or (last.reason, last.head_id) != (step.wait_reason, step.head_id)

    def add_interval(self, interval: QueueInterval) -> None:
        """Add an interval that begins with the last added step."""
        self._intervals.append(interval)

    def scheduled_time(self, step: int) -> float | None:
        """The time at which a step was scheduled; None if it was not yet, or if its time was removed."""
        index = step - self.first_step
        return self._times[index] if 0 <= index < len(self._times) else None

    def slice(self, first: int, end: int) -> Iterator[tuple[int, int, QueueInterval]]:
        """(first step, end, interval) for the recorded steps from `first` to `end` - 1."""
        end = min(end, self.next_step)
        at = max(0, bisect_right(self._intervals, first, key=lambda interval: interval.first_step) - 1)
        intervals = self._intervals[at : bisect_left(self._intervals, end, key=lambda interval: interval.first_step)]
        for interval, following in zip_longest(intervals, intervals[1:]):
            begin = max(first, interval.first_step)
            until = end if following is None else min(following.first_step, end)
            if begin < until:
                yield begin, until, interval

    def remove_before(self, step: int) -> None:
        """Remove the steps before `step`. An interval that also contains later steps is kept."""
        step = min(step, self.next_step)
        if (count := step - self.first_step) <= 0:
            return
        del self._times[:count]
        self.first_step = step
        keep = bisect_right(self._intervals, step, key=lambda interval: interval.first_step) - 1
        del self._intervals[: max(0, keep)]
