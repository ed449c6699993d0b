"""A trace of `--record-trace` of a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.simulator import SimConfig, forced_request, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.observability.trace_recorder import TraceRecorder
from chairlift.request import Request


def record_trace(
    path: Path, workload: Sequence[WorkloadRequest], config: SimConfig, cost_model: CostModel
) -> list[str]:
    """Record a simulated run; returns the ids of its requests in the order of the lines."""
    order: list[str] = []

    def requests_for(item: WorkloadRequest) -> list[Request]:
        request = forced_request(item)
        recorder.on_add(request)
        return [request]

    class Order:
        def emit(self, event: object) -> None:
            recorder.emit(event)  # type: ignore[arg-type]
            if type(event).__name__ == "RequestFinished":
                order.append(event.request_id)  # type: ignore[attr-defined]

    with closing(TraceRecorder(path)) as recorder:
        simulate(workload, config, cost_model, Order(), requests_for=requests_for)
    return order
