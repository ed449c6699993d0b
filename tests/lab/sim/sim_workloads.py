"""Small random workloads and engine configurations, whose simulations take milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

from chairlift.clock import VirtualClock
from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.events import EventList
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.executor import SimExecutor
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput

MAX_MODEL_LEN = 64


class ConstantCost:
    """A cost model with equal steps, which records their shapes."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self.shapes: list[StepShape] = []

    def seconds(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return self._seconds


class ReplayingExecutor(SimExecutor):
    """An executor that samples the recorded output tokens of each request."""

    def __init__(self, recorded: Mapping[str, Sequence[int]]) -> None:
        super().__init__(ConstantCost(), VirtualClock())
        self._recorded = recorded
        self._num_prompt_tokens: dict[str, int] = {}

    def submit(self, output: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        self._num_prompt_tokens |= {new.request_id: new.num_prompt_tokens for new in output.new_requests}
        return super().submit(output)

    def _sample(self, request_id: str, num_known: int, drafts: Sequence[int]) -> list[int]:
        start = num_known - self._num_prompt_tokens[request_id]
        sampled = [*self._recorded[request_id][start : start + 1 + len(drafts)]]
        num_accepted = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
        return sampled[: 1 + num_accepted]


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
