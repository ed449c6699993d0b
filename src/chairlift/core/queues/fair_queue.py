"""Fair sharing between tenants by the virtual token counter, VTC (Sheng et al., "Fairness in Serving Large Language
Models", OSDI'24).

    counter of a tenant = service received / weight       service = w_p * prompt tokens + w_q * output tokens

    waiting   tenant a  counter 310   [a7 a8 a9 ...]
              tenant b  counter 295   [b1]            <- the smallest counter: b1 is the head of the queue

The counter of a tenant that starts to wait is raised to the smallest counter of the waiting tenants (the counter lift),
so a tenant gains nothing by pausing. The counters of two tenants that both wait all the time differ by at most
2 * max(w_p * L_input, w_q * M), with L_input the longest prompt and M the maximum number of tokens in a
running batch. Unlike in the paper, prompt tokens in the prefix cache and tokens that are recomputed cost nothing.

With several engines, each of them also charges the service of the others, and a tenant that starts to wait is raised to
the smallest counter of the tenants that wait here or were served elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from chairlift.core.queues.request_queue import Key, PriorityQueue, RequestQueue
from chairlift.request import Request

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""w_p and w_q as in the evaluation of VTC, after OpenAI's prices."""


class FairQueue(RequestQueue):
    """The tenant with the smallest counter goes first, and has a queue by priority; the one with the largest
    counter is preempted first. `peek` is linear in the number of waiting tenants.

    Args:
        weights: tenant -> its share relative to other tenants, > 0; 1 if the tenant is not in the mapping.
    """

    has_constant_keys = False
    is_fair = uses_priority = True

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._queues: dict[str, PriorityQueue] = {}
        self._last_tenant: str | None = None
        self._served_elsewhere: frozenset[str] = frozenset()

    def counter(self, tenant: str) -> float:
        """Service that the tenant received, divided by its weight, including counter lifts."""
        return self._counters.get(tenant, 0.0)

    def key(self, request: Request) -> Key:
        return (self.counter(request.tenant), request.priority, request.arrival_index)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def push(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._queues:
            # Those that wait or are served elsewhere; the one that was removed last, if there are none.
            last = () if self._last_tenant is None else (self._last_tenant,)
            others = self._queues.keys() | self._served_elsewhere or last
            self._counters[tenant] = max(self.counter(tenant), min(map(self.counter, others), default=0.0))
            self._queues[tenant] = PriorityQueue()
        self._queues[tenant].push(request)

    def peek(self) -> Request | None:
        heads = (queue.peek() for queue in self._queues.values())
        return min((head for head in heads if head is not None), key=self._turn, default=None)

    def _turn(self, head: Request) -> Key:
        """The key without the priority, which is compared within a tenant only."""
        return (self.counter(head.tenant), 0, head.arrival_index)

    def in_order(self) -> Iterator[Request]:
        """The requests of the tenant with the smallest counter, and then the requests of the next one."""
        for tenant in sorted(self._queues, key=self.counter):
            yield from self._queues[tenant].in_order()

    def may_delay(self, request: Request, head: Request) -> bool:
        return request.tenant != head.tenant or request.priority <= head.priority

    def discard(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.discard(request)
        if not queue:
            del self._queues[request.tenant]
            self._last_tenant = request.tenant

    def record_admission(self, request: Request) -> None:
        if request.num_preemptions == 0:
            num_tokens = request.num_prompt_tokens - request.num_computed_tokens
            self._charge(request.tenant, PROMPT_TOKEN_COST * num_tokens)

    def record_sampling(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._charge(request.tenant, OUTPUT_TOKEN_COST)

    def record_accepted_drafts(self, request: Request, count: int) -> None:
        self._charge(request.tenant, OUTPUT_TOKEN_COST * count)

    def record_remote_service(self, service: Mapping[str, float]) -> None:
        for tenant, cost in service.items():
            self._charge(tenant, cost)
        self._served_elsewhere = frozenset(service)

    def _charge(self, tenant: str, cost: float) -> None:
        self._counters[tenant] = self.counter(tenant) + cost / self._weights.get(tenant, 1.0)
