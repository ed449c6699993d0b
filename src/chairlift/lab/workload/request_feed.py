"""The queue of a workload: releases requests when they are due, for the simulator, the benchmarks and load tests.

A request is ready at its arrival time, which for a turn of a session counts from the end of another request. With a
concurrency limit it is due when, in addition, one of the seats is free; ready requests take free seats in order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, check_ids


class RequestFeed:
    """Releases the requests of a workload by arrival time, within a concurrency limit.

    The feed has no clock: the caller passes times, in seconds after the start. Without `max_concurrency` the loop is
    open: arrivals do not depend on the server. With it and all arrivals at 0, the loop is closed: a request arrives at
    the moment when a seat becomes free. Requests with `follows` are a closed loop of their own.

    Args:
        requests: in any order; those that arrive at the same time keep theirs.
        max_concurrency: maximum number of released requests that have not finished; None: no limit.

    Raises:
        ConfigError: as `check_ids`, or max_concurrency is less than 1.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], max_concurrency: int | None = None) -> None:
        check_ids(requests)
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, or None for no limit, got {max_concurrency}")
        self._ready: list[tuple[float, int, WorkloadRequest]] = []
        self._followers: dict[str, list[WorkloadRequest]] = {}
        self._num_continuing = Counter(request.continues for request in requests if request.continues is not None)
        self._tokens: dict[str, Sequence[int]] = {}
        self._num_added = 0
        self._free_seats = None if max_concurrency is None else [0.0] * max_concurrency
        for request in requests:
            if request.follows is None:
                self._add(request)
            else:
                self._followers.setdefault(request.follows, []).append(request)

    def _add(self, request: WorkloadRequest) -> None:
        heapq.heappush(self._ready, (request.arrival, self._num_added, request))
        self._num_added += 1

    def pop_due(self, now: float) -> list[WorkloadRequest]:
        """Removes and returns the requests that are due at `now` seconds after the start, by due time.

        `arrival` of each is the time at which it was due, even if this call is later, and its prompt is complete.
        """
        released: list[WorkloadRequest] = []
        while (time := self.next_time()) is not None and time <= now:
            if self._free_seats is not None:
                heapq.heappop(self._free_seats)
            _, _, request = heapq.heappop(self._ready)
            released.append(replace(request, arrival=time, prompt_token_ids=self._prompt(request)))
        return released

    def _prompt(self, request: WorkloadRequest) -> Sequence[int]:
        if (source := request.continues) is None:
            return request.prompt_token_ids
        self._num_continuing[source] -= 1
        before = self._tokens[source] if self._num_continuing[source] else self._tokens.pop(source)
        return [*before, *request.prompt_token_ids]

    def next_time(self) -> float | None:
        """Seconds after the start at which the next request is due, possibly in the past.

        None if no request can be due before another one finishes, or all have been released.
        """
        if not self._ready or self._free_seats == []:
            return None
        ready = self._ready[0][0]
        return ready if self._free_seats is None else max(ready, self._free_seats[0])

    def finish(self, request_id: str, now: float, token_ids: Sequence[int] = ()) -> None:
        """Records that a released request finished or failed, `now` seconds after the start.

        Args:
            token_ids: its prompt and its output, which the requests that continue it begin with.
        """
        if self._free_seats is not None:
            heapq.heappush(self._free_seats, now)
        if self._num_continuing[request_id]:
            self._tokens[request_id] = token_ids
        for follower in self._followers.pop(request_id, ()):
            self._add(replace(follower, arrival=now + follower.arrival))

    @property
    def is_exhausted(self) -> bool:
        """True if every request has been released."""
        return not self._ready and not self._followers
