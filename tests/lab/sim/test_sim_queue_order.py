"""What the order of the queue does to latency, in virtual time."""

from __future__ import annotations

import random
from statistics import fmean

from sim_workloads import ConstantCost

from chairlift.config import SchedulerConfig
from chairlift.events import EventList, RequestFinished
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest


def mean_latency(policy: str, load: list[WorkloadRequest]) -> float:
    limits = SchedulerConfig(
        1200, 4, 256, scheduling_policy=policy, length_predictor="oracle" if policy == "srpt" else "none"
    )
    events = EventList()
    simulate(load, SimConfig(limits, 1000), ConstantCost(), events)
    return fmean(event.time - event.arrival_time for event in events.events if isinstance(event, RequestFinished))


def test_known_lengths_reduce_the_mean_latency() -> None:
    rng, time = random.Random(5), 0.0
    load = []
    for index in range(300):
        time += rng.expovariate(0.9 * 4 / 60)
        output = min(1000, round(rng.lognormvariate(3.4, 1.1)) + 1)  # mean about 55
        load.append(WorkloadRequest(f"r{index}", time, [index] * 8, output))
    assert mean_latency("srpt", load) < 0.6 * mean_latency("fcfs", load)
