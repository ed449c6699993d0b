"""The queue of a workload: releases requests when they are due, for the simulator, the benchmarks and load tests.

A request is ready at its arrival time, or `arrival` seconds after the end of the request that it names in `after`. With
a concurrency limit it is due when, in addition, one of the seats is free; ready requests take free seats in order.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, dependency_order, successors_by_id


class RequestFeed:
    """Releases the requests of a workload by arrival time, after their predecessor, within a concurrency limit.

    The feed has no clock: the caller passes times, in seconds after the start. Without `max_concurrency` the loop is
    open: arrivals do not depend on the server. With it and all arrivals at 0, the loop is closed: a request arrives at
    the moment when a seat becomes free.

    Args:
        requests: in any order; those that arrive at the same time keep theirs.
        max_concurrency: maximum number of released requests that have not finished; None: no limit.

    Raises:
        ConfigError: as `dependency_order`, or max_concurrency is less than 1.
    """

    def __init__(self, requests: Sequence[WorkloadRequest], max_concurrency: int | None = None) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, or None for no limit, got {max_concurrency}")
        dependency_order(requests)
        self._index = {request.request_id: index for index, request in enumerate(requests)}
        self._ready = [(request.arrival, i, request) for i, request in enumerate(requests) if request.after is None]
        heapq.heapify(self._ready)
        self._successors = successors_by_id(requests)
        self._free_seats = None if max_concurrency is None else [0.0] * max_concurrency
        self._unfinished: dict[str, list[int]] = {}

    def pop_due(self, now: float) -> list[WorkloadRequest]:
        """Removes and returns the requests that are due at `now` seconds after the start, by due time.

        `arrival` of each is the time at which it was due, even if this call is later. `prompt_token_ids` is a list that
        includes the history; `after` and `carries_history` are cleared.
        """
        released: list[WorkloadRequest] = []
        while (time := self.next_time()) is not None and time <= now:
            if self._free_seats is not None:
                heapq.heappop(self._free_seats)
            _, _, request = heapq.heappop(self._ready)
            prompt = list(request.prompt_token_ids)
            successors = self._successors.get(request.request_id, ())
            is_carried = any(successor.carries_history for successor in successors)
            self._unfinished[request.request_id] = prompt if is_carried else []
            released.append(replace(request, arrival=time, prompt_token_ids=prompt, after=None, carries_history=False))
        return released

    def next_time(self) -> float | None:
        """Seconds after the start at which the next request is due, possibly in the past.

        None if no request can be due before another one finishes, or all have been released.
        """
        if not self._ready or self._free_seats == []:
            return None
        ready = self._ready[0][0]
        return ready if self._free_seats is None else max(ready, self._free_seats[0])

    def finish(self, request_id: str, output_token_ids: Sequence[int], now: float) -> None:
        """Records that a released request finished or failed, with its output, `now` seconds after the start."""
        assert request_id in self._unfinished, f"{request_id!r} was not released, or has finished already"
        prompt = self._unfinished.pop(request_id)
        if self._free_seats is not None:
            heapq.heappush(self._free_seats, now)
        for successor in self._successors.pop(request_id, ()):
            own = successor.prompt_token_ids
            history = [*prompt, *output_token_ids, *own] if successor.carries_history else own
            entry = replace(successor, prompt_token_ids=history)
            heapq.heappush(self._ready, (now + successor.arrival, self._index[successor.request_id], entry))

    @property
    def is_exhausted(self) -> bool:
        """True if every request has been released."""
        return not self._ready and not self._successors

    @property
    def num_unfinished(self) -> int:
        """Number of requests that were released and have not finished."""
        return len(self._unfinished)
