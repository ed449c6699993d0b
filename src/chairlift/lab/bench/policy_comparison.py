"""Simulates the requests of a running engine under another policy, for a comparison on the live page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from chairlift.config import EngineConfig
from chairlift.events import EngineStarted, Event, EventList
from chairlift.lab.bench.simulation import sim_config_from_recording
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.observability.step_cost import CostLine
from chairlift.server.web.page_bodies import SimulatedRequestBody


@dataclass(frozen=True, slots=True)
class LinearCostModel:
    """A cost model from the line that a running engine fits to its steps."""

    line: CostLine

    def seconds(self, shape: StepShape) -> float:
        return self.line.base + self.line.per_token * shape.num_tokens


class SimulationCancelledError(Exception):
    """The events of a simulation are no longer needed."""


class _CancellableEvents(EventList):
    """A list of events that ends the simulation with its next event once it is cancelled."""

    def __init__(self, is_cancelled: Callable[[], bool]) -> None:
        super().__init__()
        self._is_cancelled = is_cancelled

    def emit(self, event: Event) -> None:
        if self._is_cancelled():
            raise SimulationCancelledError
        self.events.append(event)


def simulate_policy(
    engine: EngineStarted,
    cost: CostLine,
    policy: str,
    requests: Sequence[SimulatedRequestBody],
    is_cancelled: Callable[[], bool],
) -> list[Event]:
    """Simulate requests with their real lengths in static batches, or in continuous batches with an order of the queue
    that needs no tenant, priority or SLO.

    Everything else is as in the running engine: its KV memory, its limits and its step cost. Every prompt is different,
    so nothing is found in the prefix cache, and output lengths are known to policies that predict them. Requests that
    exceed a limit of static batching are rejected.

    Args:
        engine: the configuration of the running engine.
        cost: the cost of its steps.
        policy: one of `page_bodies.SimulatedPolicy`; static batches have `max_num_seqs` requests.
        is_cancelled: called before each event.

    Returns:
        The events of the run. Times are on the clock of the arrival times.

    Raises:
        SimulationCancelledError: it was cancelled.
    """
    config = EngineConfig(
        max_num_seqs=engine.max_num_seqs,
        kv=engine.kv,
        kv_arena=engine.kv_arena or "buddy",
        length_predictor="oracle",
    )
    if policy == "static":
        config = replace(config, batching="static", static_batch_size=engine.max_num_seqs)
    else:
        config = replace(config, scheduling_policy=policy)
    sim = sim_config_from_recording(config, replace(engine, speculative_config=None))
    ordered = sorted(requests, key=lambda request: request.arrival_time)
    log, next_token, workload = _CancellableEvents(is_cancelled), 0, []
    for request in ordered:
        prompt = range(next_token, next_token + request.num_prompt_tokens)
        next_token = prompt.stop
        workload.append(
            WorkloadRequest(request.request_id, request.arrival_time, list(prompt), request.num_output_tokens)
        )
    simulate(workload, sim, LinearCostModel(cost), log)
    first = log.events[0]
    assert isinstance(first, EngineStarted)
    log.events[0] = replace(first, time=ordered[0].arrival_time, model=engine.model)
    return log.events
