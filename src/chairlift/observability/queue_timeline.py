"""The reason why the queue was blocked in each step, recorded once for all waiting requests.

    step        0    1    2    3    4    5    6
    reason      -    -  memory memory memory seats -
    head               r7     r7    r7    r9
    intervals   |---------|---------------|-----|----|

A request that joined before step 3 and was admitted in step 6 waited for the reasons of steps 3 to 5. Intervals that
have the same reason for every request form a run. The head changes with each admission, so runs are much longer, and
what is computed for a single request reads runs only. A request that waits for many runs, because the turn alternates
between tenants, gets sums instead, which are kept for each reason and tenant.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, NamedTuple

from chairlift.events import RequestArrived, RequestWaiting, Step
from chairlift.request import WaitReason


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


UNKNOWN: Final = "unknown"
FAIRNESS: Final = "fairness"
REASONS: Final = (None, UNKNOWN, *(reason.value for reason in WaitReason))

RunKey = tuple[str | None, str]
"""The reason of a run, and the tenant of its head if that decides for which reason other tenants wait."""


class _RunSums:
    """The runs with one reason and tenant: the first step and time of each, and what those before it add up to."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._times = array("d")
        self._before: list[tuple[int, float]] = []
        self._total = (0, 0.0)
        self._is_open = False

    def begin(self, step: int, time: float) -> None:
        self._firsts.append(step)
        self._times.append(time)
        self._before.append(self._total)
        self._is_open = True

    def end(self, step: int, time: float) -> None:
        steps, seconds = self._total
        self._total = steps + step - self._firsts[-1], seconds + time - self._times[-1]
        self._is_open = False

    def until(self, step: int, time: float) -> tuple[int, float]:
        """The steps and seconds of the runs before `step`, at the time of its schedule."""
        index = bisect_left(self._firsts, step) - 1
        if index < 0:
            return self._before[0]
        is_last = index == len(self._firsts) - 1
        steps, seconds = self._before[index]
        inside = steps + step - self._firsts[index], seconds + time - self._times[index]
        if is_last and self._is_open:
            return inside
        return min(inside, self._total if is_last else self._before[index + 1])

    def remove_before(self, step: int) -> None:
        """Remove the runs before the last one that begins at or before `step`."""
        count = max(0, bisect_right(self._firsts, step) - 1)
        del self._firsts[:count], self._times[:count], self._before[:count]


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
        self._runs: list[int] = []  # The first step of each.
        self._run_key: RunKey | None = None
        self._sums: dict[RunKey, _RunSums] = {}

    def add_step(self, step: Step) -> bool:
        """Add the time of the next step; returns whether an interval begins with it, which must then be added.

        Missing steps become an interval of unknown reason. They get the time of this step.
        """
        if not self._times:
            self.first_step = self.next_step = step.step
        missing = step.step - self.next_step
        if missing > 0:
            self._times.extend([step.scheduled_time] * missing)
            self.add_interval(QueueInterval(self.next_step, UNKNOWN), "")
        self._times.append(step.scheduled_time)
        self.next_step = step.step + 1
        last = self._intervals[-1] if self._intervals else None
        return last is None or (last.reason, last.head_id) != (step.wait_reason, step.head_id)

    def add_interval(self, interval: QueueInterval, tenant: str) -> None:
        """Add an interval that begins with the last added step.

        Args:
            tenant: the tenant of the head if it decides for which reason other tenants wait, otherwise "".
        """
        self._intervals.append(interval)
        key, time = (interval.reason, tenant), self._times[interval.first_step - self.first_step]
        if not self._runs or self._run_key != key:
            if self._run_key is not None:
                self._sums[self._run_key].end(interval.first_step, time)
            self._runs.append(interval.first_step)
            self._run_key = key
            self._sums.setdefault(key, _RunSums()).begin(interval.first_step, time)

    def num_runs(self, first: int, end: int) -> int:
        """The number of runs in the recorded steps from `first` to `end` - 1."""
        if first >= min(end, self.next_step):
            return 0
        return bisect_left(self._runs, end) - max(0, bisect_right(self._runs, first) - 1)

    def sums(self, first: int, end: int, end_time: float, tenant: str) -> dict[str | None, tuple[int, float]]:
        """The number of steps from `first` to `end` - 1, and their seconds until `end_time`, by reason, of runs
        with this tenant or without one. The rest has the reason FAIRNESS."""
        first, end = max(first, self.first_step), min(end, self.next_step)
        bounds = (first, self._times[first - self.first_step]), (end, end_time)
        other_steps, other_seconds = end - first, bounds[1][1] - bounds[0][1]
        found: dict[str | None, tuple[int, float]] = {}
        for key in ((reason, of) for reason in REASONS for of in dict.fromkeys((tenant, ""))):
            if (sums := self._sums.get(key)) is not None:
                (steps, seconds), (steps_before, seconds_before) = sums.until(*bounds[1]), sums.until(*bounds[0])
                if num_steps := steps - steps_before:
                    found[key[0]] = num_steps, seconds - seconds_before
                    other_steps -= num_steps
                    other_seconds -= seconds - seconds_before
        if other_steps:
            found[FAIRNESS] = other_steps, max(0.0, other_seconds)
        return found

    def scheduled_time(self, step: int) -> float | None:
        """The time at which a step was scheduled; None if it was not yet, or if its time was removed."""
        index = step - self.first_step
        return self._times[index] if 0 <= index < len(self._times) else None

    def slice(self, first: int, end: int) -> Iterator[tuple[int, int, QueueInterval]]:
        """(first step, end, first interval) of each run in the recorded steps from `first` to `end` - 1."""
        end = min(end, self.next_step)
        at = max(0, bisect_right(self._runs, first) - 1)
        runs = self._runs[at : bisect_left(self._runs, end)]
        for run, following in zip_longest(runs, runs[1:]):
            begin = max(first, run)
            until = end if following is None else min(following, end)
            if begin < until:
                yield begin, until, self._intervals[max(0, self._index_at(begin))]

    def _index_at(self, step: int) -> int:
        """The index of the interval of a step; -1 before the first one."""
        return bisect_right(self._intervals, step, key=lambda interval: interval.first_step) - 1

    def remove_before(self, step: int) -> None:
        """Remove the steps before `step`. An interval that also contains later steps is kept."""
        step = min(step, self.next_step)
        if (count := step - self.first_step) <= 0:
            return
        del self._times[:count]
        self.first_step = step
        del self._intervals[: max(0, self._index_at(step))]
        del self._runs[: max(0, bisect_right(self._runs, step) - 1)]
        for sums in self._sums.values():
            sums.remove_before(step)
