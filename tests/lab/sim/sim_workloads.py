"""Small random workloads and engine configurations, whose simulations take milliseconds."""

from __future__ import annotations

from hypothesis import strategies as st

from chairlift.config import SchedulerConfig
from chairlift.core.baselines.selection import KVPool
from chairlift.events import EventList
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.request import WorkloadRequest

MAX_MODEL_LEN = 64


class ConstantCost:
    """A cost model with equal steps, which records their shapes."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self.shapes: list[StepShape] = []

    def seconds(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return self._seconds


def request(
    request_id: str, arrival: float, prompt: int, output: int, max_tokens: int | None = None, first: int = 0
) -> WorkloadRequest:
    """Returns a request; those with the same `first` prompt token share a prefix."""
    return WorkloadRequest(request_id, arrival, [first, *range(1, prompt)], output, max_tokens)


@st.composite
def workloads(draw: st.DrawFn) -> list[WorkloadRequest]:
    """Draws up to 12 requests with common prefixes that arrive within a few steps."""
    requests: list[WorkloadRequest] = []
    for index in range(draw(st.integers(1, 12))):
        output = draw(st.integers(1, 20))
        limit = output + draw(st.integers(0, 10))
        prompt = draw(st.integers(1, 25))
        arrival = draw(st.sampled_from([0.0, 0.0, 1.5, 4.0, 90.0]))
        requests.append(request(f"r{index}", arrival, prompt, output, limit, first=draw(st.integers(0, 2))))
    return requests


@st.composite
def configs(draw: st.DrawFn) -> SimConfig:
    """Draws a batching and a KV policy, with a pool that is often too small."""
    kv = draw(st.sampled_from(["paged", "paged", "exact", "max", "pow2", "oracle"]))
    batching = draw(st.sampled_from(["continuous", "static"]))
    seats = draw(st.integers(1, 6))
    scheduler = SchedulerConfig(
        MAX_MODEL_LEN,
        max_num_seqs=seats,
        max_num_batched_tokens=draw(st.integers(seats, 40)),
        batching=batching,
        static_batch_size=draw(st.integers(1, seats)),
        static_run_to=draw(st.sampled_from(["batch", "global"])) if batching == "static" else "batch",
    )
    caching = draw(st.booleans()) if kv == "paged" else None
    pool = KVPool(draw(st.sampled_from([16, 24, 64])), 4, MAX_MODEL_LEN, kv)
    return SimConfig(scheduler, pool, enable_prefix_caching=caching)


def small_config(**scheduler: int) -> SimConfig:
    """Returns continuous batching with 64 blocks of 4 slots."""
    return SimConfig(SchedulerConfig(MAX_MODEL_LEN, **{"max_num_seqs": 8, **scheduler}), KVPool(64, 4, MAX_MODEL_LEN))


def simulated(events: EventList, kind: type) -> list:  # type: ignore[type-arg]
    return [event for event in events.events if isinstance(event, kind)]
