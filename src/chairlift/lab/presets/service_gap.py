"""The measures of studies of fairness: the difference between the services that clients received."""

from __future__ import annotations

import math
from collections import defaultdict

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.events import Event, RequestArrived, Step
from chairlift.lab.presets.study import StudySystem
from chairlift.lab.sim.simulator import simulate


def measure(system: StudySystem, seed: int) -> dict[str, float]:
    """Simulate a system with the clients and the rates of its workload, and measure until the last arrival."""
    requests = system.requests(seed)
    tally = ServiceTally(requests[-1].arrival)
    simulate(requests, system.config, system.cost_model, tally)
    return {"service_gap": tally.gap, "largest_service_gap": tally.largest_gap}


class ServiceTally:
    """An event sink that adds up the service of each tenant until a time, with the costs of `core.queues.fair_queue`.

    The tokens of a prompt that are not cached count when its request is first admitted, and an output token when it is
    sampled.

    Attributes:
        services: the service of each tenant.
        tenants: the tenant of each request.
        gap: the difference between the largest and the smallest service; largest_gap: the largest one after a step.
    """

    def __init__(self, end: float = math.inf) -> None:
        self.services: dict[str, float] = defaultdict(float)
        self.gap = self.largest_gap = 0.0
        self._end = end
        self.tenants: dict[str, str] = {}
        self._prompts: dict[str, int] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self.tenants[event.request_id] = event.tenant
            self._prompts[event.request_id] = event.num_prompt_tokens
            self.services[event.tenant] += 0.0
        elif isinstance(event, Step) and event.time <= self._end:
            self._add(event)
            self.gap = max(self.services.values()) - min(self.services.values())
            self.largest_gap = max(self.largest_gap, self.gap)

    def _add(self, step: Step) -> None:
        num_computed = dict(zip(step.request_ids, step.num_computed, strict=True))
        for request_id in step.admitted:
            if (prompt_len := self._prompts.pop(request_id, None)) is not None:
                self.add_service(
                    self.tenants[request_id], PROMPT_TOKEN_COST * (prompt_len - num_computed.get(request_id, 0))
                )
        for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
            self.add_service(self.tenants[request_id], OUTPUT_TOKEN_COST * num_new)

    def add_service(self, tenant: str, cost: float) -> None:
        self.services[tenant] += cost
