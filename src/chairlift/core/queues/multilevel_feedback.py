"""Skip-join multi-level feedback queue (FastServe; Wu et al., "Fast Distributed Inference Serving for Large Language
Models", 2023, section 4.1): requests that received little service go first, without knowledge of their lengths.

    level 0   quantum  512   [ c d ]        a request enters the first level whose quantum covers its prompt,
    level 1   quantum 1024   [ a ]          goes down one level when it has used the quantum of its level,
    level 2   quantum 2048   [ b e f ]      and returns to level 0 when it has waited STARVATION_STEPS
    ...

Service is counted as in fair sharing: prompt tokens and output tokens by their costs; tokens that are computed again
cost nothing. A level is first come, first served. A running request is displaced by one at least two levels above it,
because it then waits behind all of its level. FastServe displaces for one level, too.

Starvation rule: a request that waits STARVATION_STEPS steps is promoted to level 0. There it is behind those that
entered the level before it, and none of them keeps its seat for more than the quanta of levels 0 and 1 while others
wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.core.queues.request_queue import Key, RequestQueue
from chairlift.request import Request

PROMPT_COST, OUTPUT_COST = int(PROMPT_TOKEN_COST), int(OUTPUT_TOKEN_COST)
"""The costs as integers."""

NO_LEVEL: Final = (0, 0)

QUANTUM: Final = 512
"""The service that a request receives in level 0, at most: the cost of 256 output tokens. Each level has twice the
service of the one above it, as in the paper, whose first quantum is the time of one step. That pays if a few outputs
are much longer than all others. The outputs of Azure's conversations are not (coefficient of variation 0.8), and a
quantum that ends in the middle of ordinary outputs displaces them again and again: fcfs has a lower mean latency."""

STARVATION_STEPS: Final = 500
"""The paper's limit is a time (alpha, section 4.1); steps are known without a clock."""


class MultilevelFeedbackQueue(RequestQueue):
    """The request of the highest level first; in a level, the one that entered the queue or was promoted first.

    Args:
        quantum: the service of level 0.
        starvation_steps: a request that waits for so many steps is promoted.
    """

    has_constant_keys = False

    def __init__(self, quantum: int = QUANTUM, starvation_steps: int = STARVATION_STEPS) -> None:
        super().__init__()
        self._quantum, self._starvation_steps = quantum, starvation_steps
        self._num_steps = 0
        self._entries: deque[tuple[int, Request]] = deque()
        self._entered: dict[Request, int] = {}
        self._promoted_at: dict[Request, int] = {}
        self._levels: dict[Request, tuple[int, int]] = {}

    def level(self, request: Request) -> int:
        """The level of the request by the service that it received, since its promotion if there was one."""
        level, end = self._levels.get(request, NO_LEVEL)
        if request.num_tokens >= end:
            level, end = self._levels[request] = self._find_level(request)
        return level

    def _find_level(self, request: Request) -> tuple[int, int]:
        """The level, and the number of tokens at which its quantum is used up."""
        num_output = request.num_tokens - request.num_prompt_tokens
        promoted_at = self._promoted_at.get(request)
        if promoted_at is None:
            service = PROMPT_COST * request.num_prompt_tokens
            first = ((service - 1) // self._quantum).bit_length()
            if not num_output:
                return first, request.num_tokens + 1
            service += OUTPUT_COST * num_output
        else:
            first, service = 0, OUTPUT_COST * (num_output - promoted_at)
        quantum = self._quantum << first
        num_used = (service // quantum + 1).bit_length() - 1
        left = quantum * ((2 << num_used) - 1) - service
        return first + num_used, request.num_tokens - -left // OUTPUT_COST

    def key(self, request: Request) -> Key:
        return (self.level(request), self._entered.get(request, 0), request.arrival_index)

    def push(self, request: Request) -> None:
        self._entered[request] = self._num_steps
        super().push(request)
        self._drop_ended_waits()
        self._entries.append((self._num_steps, request))

    def _drop_ended_waits(self) -> None:
        """Drop the oldest entries as far as they belong to no wait, so that finished requests are not kept."""
        while self._entries and self._entered.get(self._entries[0][1]) != self._entries[0][0]:
            self._entries.popleft()

    def discard(self, request: Request) -> None:
        super().discard(request)
        del self._entered[request]

    def displaces(self, head: Request, running: Request) -> bool:
        return self.level(head) + 1 < self.level(running)

    def record_sampling(self, requests: Sequence[Request]) -> None:
        """Count a step, and promote the requests that have waited too long."""
        self._num_steps += 1
        starved = []
        while self._entries and self._entries[0][0] + self._starvation_steps <= self._num_steps:
            entered, request = self._entries.popleft()
            if self._entered.get(request) == entered and self.level(request):
                del self._entered[request]
                starved.append(request)
        if starved:
            self._requests = deque(request for request in self._requests if request in self._entered)
            for request in starved:  # Each is promoted to level 0.
                del self._levels[request]
                self._promoted_at[request] = request.num_tokens - request.num_prompt_tokens
                self.push(request)

    def forget(self, request: Request) -> None:
        self._drop_ended_waits()
        self._promoted_at.pop(request, None)
        self._levels.pop(request, None)
