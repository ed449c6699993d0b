"""The measures of studies of fairness: the difference between the services that clients received."""

from __future__ import annotations

from collections import defaultdict

from chairlift.core.queues.fair_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from chairlift.events import Event, RequestArrived, Step
from chairlift.lab.presets.study import Study, StudySystem
from chairlift.lab.sim.simulator import simulate


def measure(_study: Study, system: StudySystem, seed: int) -> dict[str, float]:
    """Simulate a system with the clients and the rates of its workload."""
    requests = system.requests(seed)
    tally = ServiceTally(requests[-1].arrival)
    simulate(requests, system.config, system.cost_model, tally)
    return {"service_gap": tally.gap, "largest_service_gap": tally.largest_gap}


class ServiceTally:
    """An event sink that adds up the service of each tenant until a time, with the costs of `core.queues.fair_queue`.

    A prompt counts when its request is first admitted, and an output token when it is sampled.

    Attributes:
        gap: the difference between the largest and the smallest service.
        largest_gap: the largest of these differences after a step.
    """

    def __init__(self, end: float) -> None:
        self.gap = self.largest_gap = 0.0
        self._end = end
        self._services: dict[str, float] = defaultdict(float)
        self._tenants: dict[str, str] = {}
        self._prompts: dict[str, int] = {}

    def emit(self, event: Event) -> None:
        if isinstance(event, RequestArrived):
            self._tenants[event.request_id] = event.tenant
            self._services[event.tenant] += 0.0
            self._prompts[event.request_id] = event.num_prompt_tokens
        elif isinstance(event, Step) and event.time <= self._end:
            for request_id in event.admitted:
                self._services[self._tenants[request_id]] += PROMPT_TOKEN_COST * self._prompts.pop(request_id, 0)
            for request_id, num_new in zip(event.request_ids, event.num_new, strict=True):
                self._services[self._tenants[request_id]] += OUTPUT_TOKEN_COST * num_new
            self.gap = max(self._services.values()) - min(self._services.values())
            self.largest_gap = max(self.largest_gap, self.gap)
