"""The difference between the services of tenants that wait, and the bounds on it that VTC and DLPM prove."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.core.queues.prefix_fair_queue import QUANTUM
from chairlift.events import Event, RequestArrived, RequestFinished, Step
from chairlift.lab.presets.measures import ServiceTally
from chairlift.lab.workload.request import WorkloadRequest


class WaitingServiceTally(ServiceTally):
    """A tally that also compares tenants while both wait. Service is divided by the weight of the tenant.

    Attributes:
        waiting: the ids of the waiting requests of each tenant.
        largest_waiting_gap: the largest difference between the services that two tenants received in an interval in
            which both had waiting requests all the time.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.waiting: dict[str, set[str]] = defaultdict(set)
        self.largest_waiting_gap = 0.0
        self._weights = weights or {}
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, Step):
            self._compare()
        super().emit(event)
        if isinstance(event, RequestArrived):
            self.waiting[event.tenant].add(event.request_id)
        elif isinstance(event, RequestFinished):
            self.waiting[self.tenants[event.request_id]].discard(event.request_id)
        elif isinstance(event, Step):
            for request_id in event.preempted:
                self.waiting[self.tenants[request_id]].add(request_id)
            for request_id in event.admitted:
                self.waiting[self.tenants[request_id]].discard(request_id)
            self._compare()

    def add_service(self, tenant: str, cost: float) -> None:
        super().add_service(tenant, cost / self._weights.get(tenant, 1.0))

    def _compare(self) -> None:
        """Extend the range of the difference of each pair of tenants that wait, and forget that of other pairs."""
        for pair in combinations(sorted(self.services), 2):
            if not all(self.waiting[tenant] for tenant in pair):
                self._ranges.pop(pair, None)
                continue
            ahead = self.services[pair[0]] - self.services[pair[1]]
            low, high = self._ranges.get(pair, (ahead, ahead))
            self._ranges[pair] = low, high = min(low, ahead), max(high, ahead)
            self.largest_waiting_gap = max(self.largest_waiting_gap, high - low)


def service_bound(policy: str, requests: Sequence[WorkloadRequest], num_slots: int, max_num_seqs: int) -> float | None:
    """The bound of a scheduling policy on `WaitingServiceTally.largest_waiting_gap`; None if it has none.

    VTC (`fair`) has 2U, where U is the larger of the cost of the longest prompt and that of the tokens of a full batch,
    which pool and seats limit. DLPM (`dlpm`) with the quantum Q has 2 * (U + Q). All weights are 1.
    """
    if policy not in ("fair", "dlpm"):
        return None
    longest_prompt = max(len(request.prompt_token_ids) for request in requests)
    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    largest = max(PROMPT_TOKEN_COST * longest_prompt, OUTPUT_TOKEN_COST * min(num_slots, max_num_seqs * longest))
    return 2 * (largest + (QUANTUM if policy == "dlpm" else 0.0))
