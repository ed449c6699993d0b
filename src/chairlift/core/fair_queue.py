"""Fair sharing between tenants: the virtual token counter, VTC (Sheng et al., "Fairness in Serving Large Language
Models", OSDI'24, section 4, algorithm 2).

    counter of a tenant = service that it received / its weight       service = w_p * prompt + w_q * output tokens

    waiting   tenant a  counter 310   [a7 a8 a9 ...]
              tenant b  counter 295   [b1]            <- the smallest counter: b1 is the head of the queue

Whoever queues again after an absence starts no lower than the others who wait (the counter lift), so nobody saves up
service by staying away. Two tenants who both wait all the time are never further apart than 2 * max(w_p * L_input,
w_q * M) (theorem 4.4), with L_input the longest prompt and M the most tokens that a running batch may hold.

Where this goes beyond the paper: prompt tokens found in the prefix cache cost nothing, since nothing is computed for
them; what a preempted request computes again costs its tenant nothing, since it gets nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from chairlift.core.request_queue import Key, RequestQueue, WaitingQueue
from chairlift.request import Request

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""w_p and w_q as in the paper's evaluation (section 5.1), after what providers charge."""


def _own_order(request: Request) -> Key:
    """Within a tenant: the smaller priority first, then first come."""
    return (0.0, request.priority, request.arrival_index)


class Fair:
    """The tenant with the smallest counter first; the one with the largest is preempted first.

    Args:
        weights: tenant -> its share in relation to others, > 0; 1 for those not named.
    """

    is_constant = False

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._counters: dict[str, float] = {}

    def counter(self, tenant: str) -> float:
        """Service received, over the weight; lifted where the tenant was away."""
        return self._counters.get(tenant, 0.0)

    def key(self, request: Request) -> Key:
        return (self.counter(request.tenant), request.priority, request.arrival_index)

    def make_queue(self) -> WaitingQueue:
        return FairQueue(self.counter, self.lift)

    def lift(self, tenant: str, floor: float) -> None:
        """The tenant waits again, beside others whose smallest counter is `floor`."""
        self._counters[tenant] = max(self.counter(tenant), floor)

    def note_admitted(self, request: Request) -> None:
        if request.num_preemptions == 0:
            num_tokens = request.num_prompt_tokens - request.num_computed_tokens
            self._charge(request.tenant, PROMPT_TOKEN_COST * num_tokens)

    def note_sampling(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._charge(request.tenant, OUTPUT_TOKEN_COST)

    def _charge(self, tenant: str, cost: float) -> None:
        self._counters[tenant] = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)


class FairQueue:
    """A queue for each tenant who waits. Finding the head is linear in the number of those.

    Args:
        counter: of a tenant.
        lift: called with a tenant who begins to wait, and the counter below which it may not start.
    """

    def __init__(self, counter: Callable[[str], float], lift: Callable[[str, float], None]) -> None:
        self._counter = counter
        self._lift = lift
        self._queues: dict[str, RequestQueue] = {}
        self._left_last: str | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._queues:
            self._lift(tenant, self._floor())
            self._queues[tenant] = RequestQueue(_own_order)
        self._queues[tenant].push(request)
        self._size += 1

    def _floor(self) -> float:
        others: Iterable[str] = self._queues
        if not self._queues:
            others = () if self._left_last is None else (self._left_last,)
        return min(map(self._counter, others), default=0.0)

    def peek(self) -> Request | None:
        heads = (queue.peek() for queue in self._queues.values())
        return min((head for head in heads if head is not None), key=self._key, default=None)

    def _key(self, head: Request) -> Key:
        return (self._counter(head.tenant), 0, head.arrival_index)

    def pop(self) -> Request:
        head = self.peek()
        assert head is not None
        self._queues[head.tenant].pop()
        self._shrink(head.tenant)
        return head

    def discard(self, request: Request) -> None:
        self._queues[request.tenant].discard(request)
        self._shrink(request.tenant)

    def _shrink(self, tenant: str) -> None:
        self._size -= 1
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._left_last = tenant
