"""Events of simulated runs."""

from __future__ import annotations

from typing import Any

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.events import Event, EventList
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.synthetic import make_workload


class Linear:
    """A cost model with a constant for the weights and a cost for each token."""

    def seconds(self, shape: Any) -> float:
        return 0.02 + 0.001 * shape.num_tokens


def simulated(
    num_requests: int = 24,
    output: str = "uniform:2..30",
    *,
    kv: str = "paged",
    num_blocks: int = 64,
    max_tokens: str | None = "fixed:40",
    rate: float | None = None,
    **limits: Any,
) -> list[Event]:
    """Events of a simulated run."""
    declared = None if max_tokens is None else parse_lengths(max_tokens)
    workload = make_workload(
        0, num_requests, parse_lengths("uniform:4..20"), parse_lengths(output), ArrivalProcess(rate), 100,
        max_tokens=declared,
    )  # fmt: skip
    scheduler = SchedulerConfig(64, **{"max_num_seqs": 8, "max_num_batched_tokens": 32, **limits})
    log = EventList()
    simulate(workload, SimConfig(scheduler, KVPool(num_blocks, 4, scheduler.max_model_len, kv)), Linear(), log)
    return log.events


def static(size: int, **options: Any) -> list[Event]:
    return simulated(batching="static", static_batch_size=size, **options)
