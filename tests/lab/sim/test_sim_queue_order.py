"""What the order of the queue does to latency and to goodput, in virtual time."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from sim_workloads import ConstantCost

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.events import EventList, RequestFinished
from chairlift.lab.metrics.run import summarize
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.slo import SLO
from chairlift.step_time import StepTime


def mean_latency(policy: str, load: list[WorkloadRequest]) -> float:
    limits = SchedulerConfig(
        1200, 4, 256, scheduling_policy=policy, length_predictor="oracle" if policy == "srpt" else "none"
    )
    events = EventList()
    simulate(load, SimConfig(limits, KVPool(1000, 16, limits.max_model_len)), ConstantCost(), events)
    return fmean(event.time - event.arrival_time for event in events.events if isinstance(event, RequestFinished))


def test_known_lengths_reduce_the_mean_latency() -> None:
    rng, time = random.Random(5), 0.0
    load = []
    for index in range(300):
        time += rng.expovariate(0.9 * 4 / 60)
        output = min(1000, round(rng.lognormvariate(3.4, 1.1)) + 1)  # mean about 55
        load.append(WorkloadRequest(f"r{index}", time, [index] * 8, output))
    assert mean_latency("srpt", load) < 0.6 * mean_latency("fcfs", load)


class LinearCost:
    """A cost model with the time of a step that the scheduler knows."""

    time = StepTime(0.012, 0.00035, 1e-8, 0.1, 0.2)

    def seconds(self, shape: StepShape) -> float:
        return self.time.fixed + self.time.per_token * shape.num_tokens + self.time.per_pair * shape.num_pairs


def goodput(policy: str, load: list[WorkloadRequest]) -> float:
    limits = SchedulerConfig(2048, 32, 512, scheduling_policy=policy, step_time=LinearCost.time)
    events = EventList()
    simulate(load, SimConfig(limits, KVPool(4000, 16, limits.max_model_len)), LinearCost(), events)
    return summarize(events.events).values()["goodput"]


def test_deadlines_raise_the_goodput_under_overload() -> None:
    """Lengths like those of Azure's trace of conversations, at half the size, at 1.1 times the capacity."""
    rng, time = random.Random(3), 0.0
    load = []
    for index in range(250):
        time += rng.expovariate(1.1 * 3.6)
        prompt = min(1900, round(rng.lognormvariate(6.1, 0.9)) + 1)
        output = min(500, round(rng.lognormvariate(4.2, 0.8)) + 1)
        tokens = rng.randbytes(prompt)
        load.append(WorkloadRequest(f"r{index}", time, tokens, output, slo=SLO(1500, 150)))
    assert goodput("edf", load) > 1.5 * goodput("fcfs", load) > 0


@pytest.mark.parametrize(
    ("rate", "prompt", "output", "ratio"), [(8.5, (5.0, 0.5), (2.95, 0.9), 1.01), (6.0, (5.95, 0.9), (1.2, 1.0), 0.8)]
)
def test_levels_shorten_the_mean_latency_or_leave_it_as_it_is(
    rate: float, prompt: tuple[float, float], output: tuple[float, float], ratio: float
) -> None:
    """Lengths like those of Azure's traces of conversations and of code, scaled down, near the capacity."""
    rng, time, load = random.Random(5), 0.0, []
    for index in range(250):
        time += rng.expovariate(rate)
        num_prompt, num_output = (min(1000, round(rng.lognormvariate(*each)) + 1) for each in (prompt, output))
        load.append(WorkloadRequest(f"r{index}", time, rng.randbytes(num_prompt), num_output))
    mean: dict[str, float] = {}
    for policy in ("fcfs", "mlfq"):
        events = EventList()
        limits = SchedulerConfig(2048, 8, 512, scheduling_policy=policy)
        simulate(load, SimConfig(limits, KVPool(4000, 16, limits.max_model_len)), LinearCost(), events)
        mean[policy] = summarize(events.events).values()["e2e_latency_mean"]
    assert mean["mlfq"] < ratio * mean["fcfs"]
