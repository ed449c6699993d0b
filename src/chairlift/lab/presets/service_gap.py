"""The measures of studies of fairness: the difference between the services that clients received, and its bounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.core.queues.prefix_fair_queue import QUANTUM
from chairlift.events import Event, RequestArrived, RequestFinished, Step
from chairlift.lab.presets.study import StudySystem
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest


def measure(system: StudySystem, seed: int) -> dict[str, float]:
    """Simulate a system with the clients and the rates of its workload, and measure until the last arrival."""
    requests = system.requests(seed)
    tally = ServiceTally(requests[-1].arrival)
    simulate(requests, system.config, system.cost_model, tally)
    return {"service_gap": tally.gap, "largest_service_gap": tally.largest_gap}


class ServiceTally:
    """An event sink that adds up the service of each tenant until a time, with the costs of `core.queues.fair_queue`.

    The tokens of a prompt that are not cached count when its request is first admitted, and an output token when it is
    sampled. Service is divided by the weight of the tenant.

    Attributes:
        services: the service of each tenant.
        waiting: the ids of the waiting requests of each tenant.
        gap: the difference between the largest and the smallest service; largest_gap: the largest one after a step.
        largest_waiting_gap: the largest difference between the services that two tenants received in an interval in
            which both had waiting requests all the time.
    """

    def __init__(self, end: float = math.inf, weights: Mapping[str, float] | None = None) -> None:
        self.services: dict[str, float] = defaultdict(float)
        self.waiting: dict[str, set[str]] = defaultdict(set)
        self.gap = self.largest_gap = self.largest_waiting_gap = 0.0
        self._end = end
        self._weights = weights or {}
        self._tenants: dict[str, str] = {}
        self._prompts: dict[str, int] = {}
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._tenants[event.request_id] = event.tenant
            self._prompts[event.request_id] = event.num_prompt_tokens
            self.services[event.tenant] += 0.0
            self.waiting[event.tenant].add(event.request_id)
        elif isinstance(event, RequestFinished):
            self.waiting[self._tenants[event.request_id]].discard(event.request_id)
        elif isinstance(event, Step) and event.time <= self._end:
            self._compare()
            self._add(event)
            self._compare()
            self.gap = max(self.services.values()) - min(self.services.values())
            self.largest_gap = max(self.largest_gap, self.gap)

    def _add(self, step: Step) -> None:
        num_computed = dict(zip(step.request_ids, step.num_computed, strict=True))
        for request_id in step.preempted:
            self.waiting[self._tenants[request_id]].add(request_id)
        for request_id in step.admitted:
            self.waiting[self._tenants[request_id]].discard(request_id)
            if (prompt_len := self._prompts.pop(request_id, None)) is not None:
                self._serve(request_id, PROMPT_TOKEN_COST * (prompt_len - num_computed.get(request_id, 0)))
        for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
            self._serve(request_id, OUTPUT_TOKEN_COST * num_new)

    def _serve(self, request_id: str, cost: float) -> None:
        tenant = self._tenants[request_id]
        self.services[tenant] += cost / self._weights.get(tenant, 1.0)

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
    """The bound of a scheduling policy on `ServiceTally.largest_waiting_gap`; None if it has none.

    VTC (`fair`) has 2U, where U is the larger of the cost of the longest prompt and that of the tokens of a full batch,
    which pool and seats limit. DLPM (`dlpm`) with the quantum Q has 2 * (U + Q). All weights are 1.
    """
    if policy not in ("fair", "dlpm"):
        return None
    longest_prompt = max(len(request.prompt_token_ids) for request in requests)
    longest = max(len(request.prompt_token_ids) + request.output_len for request in requests)
    largest = max(PROMPT_TOKEN_COST * longest_prompt, OUTPUT_TOKEN_COST * min(num_slots, max_num_seqs * longest))
    return 2 * (largest + (QUANTUM if policy == "dlpm" else 0.0))
