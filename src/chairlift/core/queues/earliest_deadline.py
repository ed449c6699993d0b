"""Earliest deadline first (EDF; Liu and Layland, 1973) over the objectives of the time to first token.

    preempted, by arrival  >  can meet their objective, by deadline  >  the others, by arrival
                                                                        ^ the oldest has each eighth turn

Under overload plain EDF serves each request just too late. So a request that would miss its objective even if its
prompt were computed alone from now on yields to those that can meet theirs, and waits with the requests that have no
objective. Objectives of the time per output token limit the chunks of prompts beside a stream (`ChunkAllowance`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

from chairlift.core.queues.request_queue import Key, RequestQueue
from chairlift.request import Request

TURN_OF_OTHERS: Final = 8
"""While requests yield, one of this number of admissions goes to the oldest of them, so that none starves."""


class EarliestDeadlineQueue(RequestQueue):
    """The requests that can meet their objective of the time to first token by deadline, and then the others.

    A preempted request goes before them, because its stream is interrupted. Requests without objectives are in the
    order of their arrival.

    Args:
        max_num_batched_tokens: maximum number of tokens in a step.
        num_cached_tokens: the number of tokens of a request that are in the prefix cache.
    """

    has_constant_keys = False
    keeps_tpot = True

    def __init__(self, max_num_batched_tokens: int, num_cached_tokens: Callable[[Request], int]) -> None:
        super().__init__()
        self._max_num_batched_tokens = max_num_batched_tokens
        self._num_cached_tokens = num_cached_tokens
        self._now = -math.inf
        self._deadlines: dict[Request, float] = {}
        self._num_passed = 0
        self._head: Request | None = None

    def key(self, request: Request) -> Key:
        deadline = -math.inf if request.num_preemptions else self._deadlines.get(request, math.inf)
        return (deadline, 0, request.arrival_index)

    def begin_step(self, now: float) -> None:
        self._now = now
        self._head = None

    def push(self, request: Request) -> None:
        slo = request.sampling_params.slo
        if slo is not None and slo.ttft_ms is not None and not request.num_preemptions:
            self._deadlines[request] = request.arrival_time + slo.ttft_ms / 1e3
        super().push(request)
        self._head = None

    def peek(self) -> Request | None:
        """The head stays the same during a step, though memory is allocated to it, until the queue changes."""
        if self._head is None:
            self._head = self._find_head()
        return self._head

    def _find_head(self) -> Request | None:
        requests = self._requests
        while requests and self._is_late(requests[0]):
            late = requests.popleft()
            del self._deadlines[late]
            super().push(late)
        if not requests or requests[0].num_preemptions or self._num_passed < TURN_OF_OTHERS - 1:
            return requests[0] if requests else None
        first_of_others = bisect_left(requests, (math.inf, 0, -1), key=self.key)
        return requests[first_of_others % len(requests)]

    def discard(self, request: Request) -> None:
        super().discard(request)
        self._head = None

    def record_admission(self, request: Request) -> None:
        if request.leader_id is not None and request.sampling_params.use_beam_search:
            return  # a beam that joins its leader was not in the queue
        has_others = bool(self._requests) and self.key(self._requests[-1])[0] == math.inf
        if self.key(request)[0] == math.inf or not has_others:
            self._num_passed = 0
        elif not request.num_preemptions:
            self._num_passed += 1

    def forget(self, request: Request) -> None:
        self._deadlines.pop(request, None)

    def _is_late(self, request: Request) -> bool:
        """Whether a request with an objective misses it even if its prompt is computed alone from now on."""
        if request.num_preemptions or request not in self._deadlines:
            return False
        seconds = self._deadlines[request] - self._now
        if seconds < self._prompt_seconds(request, 0):
            return seconds < self._prompt_seconds(request, self._num_cached_tokens(request))
        return False

    def _prompt_seconds(self, request: Request, num_cached: int) -> float:
        if (time := self.step_time) is None:
            return 0.0
        num_tokens = request.num_prompt_tokens - num_cached
        num_steps = -(-num_tokens // self._max_num_batched_tokens)
        return num_steps * time.fixed + time.chunk_seconds(num_cached, num_tokens)
