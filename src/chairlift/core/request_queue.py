"""Who goes first: the order of the queue and of the running batch, as one key a request."""

from __future__ import annotations

import heapq
from typing import Protocol

from chairlift.request import Request, RequestStatus

Key = tuple[int, int]


class SchedulingPolicy(Protocol):
    """Smaller keys go first; the largest key that runs is preempted first. Keys are unique and never change."""

    def key(self, request: Request) -> Key: ...


class FCFS:
    """First come, first served."""

    def key(self, request: Request) -> Key:
        return (0, request.arrival_index)


class Priority:
    """The smaller priority first; first come among equals."""

    def key(self, request: Request) -> Key:
        return (request.priority, request.arrival_index)


def scheduling_policy(name: str) -> SchedulingPolicy:
    """The policy of a validated name (see `config.SCHEDULING_POLICIES`)."""
    policies: dict[str, type[SchedulingPolicy]] = {"fcfs": FCFS, "priority": Priority}
    return policies[name]()


class RequestQueue:
    """Waiting requests by key. Removal is O(1): the entry stays in the heap until it surfaces or half are stale."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Key, Request]] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        heapq.heappush(self._heap, (self._policy.key(request), request))

    def peek(self) -> Request | None:
        """The first waiting request."""
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return what `peek` returned."""
        return heapq.heappop(self._heap)[1]

    def discard(self) -> None:
        """A request that was pushed is not WAITING any more."""
        self._num_stale += 1
        if self._num_stale > 16 and 2 * self._num_stale > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0
