"""First come, first served, and priorities: the order of the queue and of the running batch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from chairlift.request import Request, RequestStatus

Key = tuple[float, int, int]
"""Position of a request in an order: smaller keys go first, and keys are unique."""


class WaitingQueue(Protocol):
    """Waiting requests in the order of a scheduling policy."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Add a request whose status is WAITING; it may have run before."""

    def peek(self) -> Request | None:
        """The head of the queue; None if the queue is empty."""

    def pop(self) -> Request:
        """Remove and return the head, which the last call of `peek` returned."""

    def discard(self, request: Request) -> None:
        """Remove a request whose status is no longer WAITING."""


class FCFSPolicy:
    """First come, first served; the base class of scheduling policies.

    Requests with smaller keys go first. The running request with the largest key is preempted first.

    Attributes:
        has_constant_keys: the key of a request never changes. Otherwise it changes between two steps, or when a request
            of the same tenant is admitted.
    """

    has_constant_keys = True

    def key(self, request: Request) -> Key:
        return (0.0, 0, request.arrival_index)

    def make_queue(self) -> WaitingQueue:
        """Create an empty queue in the order of this policy."""
        return RequestQueue(self.key)

    def record_admission(self, request: Request) -> None:
        """Called when a request has been admitted to the batch."""

    def record_sampling(self, requests: Sequence[Request]) -> None:
        """Called when a step is planned that samples a token for each of these requests."""


class PriorityPolicy(FCFSPolicy):
    """The smaller `priority` first; first come, first served among equals."""

    def key(self, request: Request) -> Key:
        return (0.0, request.priority, request.arrival_index)


class RequestQueue:
    """A queue with constant keys. A discarded entry stays in the heap until it reaches the top, or half are stale."""

    def __init__(self, key: Callable[[Request], Key]) -> None:
        self._key = key
        self._heap: list[tuple[Key, Request]] = []
        self._num_stale = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_stale

    def push(self, request: Request) -> None:
        assert request.status is RequestStatus.WAITING
        heapq.heappush(self._heap, (self._key(request), request))

    def peek(self) -> Request | None:
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def discard(self, request: Request) -> None:
        assert request.status is not RequestStatus.WAITING
        self._num_stale += 1
        if self._num_stale > 16 and 2 * self._num_stale > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0
