"""Who goes first: the order of the queue and of the running batch, as one key a request."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from chairlift.request import Request, RequestStatus

Key = tuple[float, int, int]


class WaitingQueue(Protocol):
    """Who waits, and who of them is next."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """A request, whose status is WAITING, queues; it may have run before."""
        ...

    def peek(self) -> Request | None:
        """The head: who is next."""
        ...

    def pop(self) -> Request:
        """Remove and return what `peek` returned."""
        ...

    def discard(self, request: Request) -> None:
        """A request that was pushed is not WAITING any more."""
        ...


class SchedulingPolicy(Protocol):
    """Smaller keys go first; the largest key that runs is preempted first. Keys are unique.

    Attributes:
        is_constant: a request's key never changes. Otherwise it changes between two steps at most, or where its own
            tenant gets a request admitted.
    """

    is_constant: bool

    def key(self, request: Request) -> Key: ...

    def make_queue(self) -> WaitingQueue:
        """An empty queue in this policy's order."""
        ...

    def note_admitted(self, request: Request) -> None:
        """A request got its memory and its seat."""
        ...

    def note_sampling(self, requests: Sequence[Request]) -> None:
        """A step is planned that gives each of these a token."""
        ...


class _ConstantKeys:
    """The order is decided when a request arrives."""

    is_constant = True

    def key(self, request: Request) -> Key:
        raise NotImplementedError

    def make_queue(self) -> WaitingQueue:
        return RequestQueue(self.key)

    def note_admitted(self, request: Request) -> None:
        """Changes nothing."""

    def note_sampling(self, requests: Sequence[Request]) -> None:
        """Changes nothing."""


class FCFS(_ConstantKeys):
    """First come, first served."""

    def key(self, request: Request) -> Key:
        return (0.0, 0, request.arrival_index)


class Priority(_ConstantKeys):
    """The smaller priority first; first come among equals."""

    def key(self, request: Request) -> Key:
        return (0.0, request.priority, request.arrival_index)


class RequestQueue:
    """Waiting requests by keys that never change. Removal is O(1): the entry stays in the heap until it surfaces or
    half are stale."""

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
        """The first waiting request."""
        while self._heap and self._heap[0][1].status is not RequestStatus.WAITING:
            heapq.heappop(self._heap)
            self._num_stale -= 1
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return what `peek` returned."""
        return heapq.heappop(self._heap)[1]

    def discard(self, request: Request) -> None:
        """A request that was pushed is not WAITING any more."""
        assert request.status is not RequestStatus.WAITING
        self._num_stale += 1
        if self._num_stale > 16 and 2 * self._num_stale > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[1].status is RequestStatus.WAITING]
            heapq.heapify(self._heap)
            self._num_stale = 0
