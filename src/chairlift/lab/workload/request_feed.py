"""Hands out the requests of a workload as they fall due: the one rule for simulation, bench and load generator.

                     after: its predecessor has ended
to come ---------------------------+
   |                               |
   v                               v
ready at its arrival, or the predecessor's end + arrival
   |
   v   in that order, each into the place that became free first
due at the later of the two ---> out ---> done, and the place is free again
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from chairlift.errors import ConfigError
from chairlift.lab.workload.request import WorkloadRequest, dependency_order, successors_by_id


class RequestFeed:
    """Which requests are due: by arrival time, after their predecessor, within a concurrency limit.

    Keeps no clock: times are seconds after the start, and come from whoever drives. Without `max_concurrency` the load
    is open: it does not wait for the server. With it, and all arrivals at 0, the loop is closed: a request arrives at
    the moment a place became free.

    Args:
        requests: in any order; those that arrive at the same time keep theirs.
        max_concurrency: requests that are out at once, at most; None: no limit.

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
        self._followers = successors_by_id(requests)
        self._places = None if max_concurrency is None else [0.0] * max_concurrency
        self._out: dict[str, list[int]] = {}

    def pop_due(self, now: float) -> list[WorkloadRequest]:
        """The requests that are due at `now` seconds after the start and were not handed out before, by due time.

        They are as they arrive: `arrival` is when the request was due, however late this call is; `prompt_token_ids`
        is a list and holds the history; `after` and `carries_history` have done their work and are cleared.
        """
        handed_out: list[WorkloadRequest] = []
        while (time := self.next_time()) is not None and time <= now:
            if self._places is not None:
                heapq.heappop(self._places)
            _, _, request = heapq.heappop(self._ready)
            prompt = list(request.prompt_token_ids)
            self._out[request.request_id] = prompt if self._is_carried_on(request) else []
            handed_out.append(
                replace(request, arrival=time, prompt_token_ids=prompt, after=None, carries_history=False)
            )
        return handed_out

    def next_time(self) -> float | None:
        """When the next request is due, in seconds after the start, if no other has to end before: possibly in the
        past. None if nothing can be due without an end, or all have been handed out."""
        if not self._ready or self._places == []:
            return None
        ready = self._ready[0][0]
        return ready if self._places is None else max(ready, self._places[0])

    def finish(self, request_id: str, output_token_ids: Sequence[int], now: float) -> None:
        """A request that was handed out ended (or failed, with what came of it) `now` seconds after the start."""
        assert request_id in self._out, f"{request_id!r} was not handed out, or has ended already"
        prompt = self._out.pop(request_id)
        if self._places is not None:
            heapq.heappush(self._places, now)
        for follower in self._followers.pop(request_id, ()):
            own = follower.prompt_token_ids
            history = [*prompt, *output_token_ids, *own] if follower.carries_history else own
            entry = replace(follower, prompt_token_ids=history)
            heapq.heappush(self._ready, (now + follower.arrival, self._index[follower.request_id], entry))

    @property
    def is_exhausted(self) -> bool:
        """Every request was handed out."""
        return not self._ready and not self._followers

    @property
    def num_unfinished(self) -> int:
        """Requests that were handed out and have not ended."""
        return len(self._out)

    def _is_carried_on(self, request: WorkloadRequest) -> bool:
        return any(follower.carries_history for follower in self._followers.get(request.request_id, ()))
