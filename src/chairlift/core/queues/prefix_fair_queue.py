"""Deficit longest prefix match, DLPM (Cao et al., "Locality-aware Fair Scheduling in LLM Serving", 2025): fair
sharing between tenants that prefers requests whose prompts are cached.

    tenant a   deficit  310    [a7 a8 a9]       may be admitted: of all requests of a and c, that with the longest
    tenant b   deficit  -20    [b1 b2]          cached prefix is the head of the queue
    tenant c   deficit  100    [c4]

Service reduces the deficit of a tenant. Only tenants with a deficit above 0 are admitted; when none of those that wait
has one, every tenant without one gets a quantum, until one of those that wait has. So a deficit is at most the quantum
Q and at least -U, with U = max(w_p * L_input, w_q * M) as in VTC. Two tenants that both wait all the time get the same
number of quanta, so their services differ by the changes of their deficits: at most 2 * (U + Q). A larger quantum means
more hits in the cache and a wider bound.

Within a tenant the longest prefix alone has no bound, so its oldest request goes first after MAX_OVERTAKEN others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Final

from chairlift.core.queues.fair_queue import FairQueue
from chairlift.core.queues.request_queue import PriorityQueue
from chairlift.request import Request

QUANTUM: Final = 1024.0
"""Q: the service of about 340 prompt and 340 output tokens."""

MAX_COMPARED: Final = 64
"""Requests whose cached prefixes are compared: the oldest of each tenant, the largest deficits first. A choice costs as
many look-ups."""

MAX_OVERTAKEN: Final = 64


class PrefixFairQueue(FairQueue):
    """The request with the longest cached prefix among the tenants with a deficit; the tenant with the smallest one is
    preempted first. The deficit is the counter of fair sharing with the opposite sign, and it is refilled, not lifted.

    Args:
        weights: tenant -> its share relative to other tenants; service is divided by it.
        num_cached_tokens: the number of prompt tokens of a request that are in the prefix cache.
        quantum: Q, in the unit of service.
    """

    uses_priority = False

    def __init__(
        self, weights: Mapping[str, float], num_cached_tokens: Callable[[Request], int], quantum: float = QUANTUM
    ) -> None:
        super().__init__(weights)
        self._num_cached_tokens = num_cached_tokens
        self._quantum = quantum
        self._overtaken: dict[str, int] = {}
        self._head: Request | None = None

    def deficit(self, tenant: str) -> float:
        """The service that the tenant may receive before others have their turn."""
        return -self.counter(tenant)

    def push(self, request: Request) -> None:
        self._queues.setdefault(request.tenant, PriorityQueue()).push(request)
        self._counters.setdefault(request.tenant, 0.0)
        self._head = None

    def peek(self) -> Request | None:
        """The head stays the same until the queue changes, or its tenant has no deficit left."""
        if self._queues and (self._head is None or self.deficit(self._head.tenant) <= 0):
            # Tenants without a deficit get quanta until one of those that wait has one.
            if num_rounds := min(map(self._rounds_until_deficit, self._queues)):
                for tenant, counter in self._counters.items():
                    rounds = min(num_rounds, self._rounds_until_deficit(tenant))
                    self._counters[tenant] = counter - self._quantum * rounds
            compared = islice(self._candidates(), MAX_COMPARED)
            self._head = min(compared, key=lambda each: (-self._num_cached_tokens(each), each.arrival_index))
        return self._head

    def _candidates(self) -> Iterator[Request]:
        """The oldest requests of the tenants with a deficit."""
        tenants = sorted((tenant for tenant in self._queues if self.deficit(tenant) > 0), key=self.counter)
        for tenant in tenants:
            is_late = self._overtaken.get(tenant, 0) >= MAX_OVERTAKEN
            yield from islice(self._queues[tenant].in_order(), 1 if is_late else -(-MAX_COMPARED // len(tenants)))

    def _rounds_until_deficit(self, tenant: str) -> int:
        counter = self.counter(tenant)
        return 0 if counter < 0 else math.floor(counter / self._quantum) + 1

    def take(self, request: Request) -> Request:
        tenant = request.tenant
        is_oldest = request is self._queues[tenant].peek()
        self._overtaken[tenant] = 0 if is_oldest else self._overtaken.get(tenant, 0) + 1
        return super().take(request)

    def discard(self, request: Request) -> None:
        super().discard(request)
        if request.tenant not in self._queues:
            self._overtaken.pop(request.tenant, None)
        self._head = None
