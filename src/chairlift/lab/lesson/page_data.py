"""The data of the lesson's page: events, the table, a run with a shared prefix, and results of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.core.factory import KVPool
from chairlift.events import Event, EventList, RequestArrived, Step
from chairlift.lab.bench.policies import parse_policies
from chairlift.lab.lesson import summary
from chairlift.lab.lesson.runs import POLICIES, TITLES, VOCAB_SIZE, Lesson, declare
from chairlift.lab.report.recorded_run import RecordedRun
from chairlift.lab.sim.cost_model import StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import synthetic_tokens

MAX_STEPS: Final = 240
"""The first steps of each run are on the page: about two static batches."""

SEATS: Final = (4, 8, 16, 32)
SPREADS: Final = {"none": "fixed:24", "medium": "uniform:1..47", "large": "exp:24,1..100"}
"""Output lengths with the same mean."""
LIMITS: Final = {"true length": 0, "50": 50, "100": 100, "all that fits": None}
"""`max_tokens` of the requests by name, or the length of a longer answer."""
ORDERS: Final = ("fcfs", "srpt", "mlfq")
"""The orders of the queue under `paged`; the others order requests of one client in the same way as fcfs."""
DECLARING: Final = parse_policies("static/exact,exact")
"""The policies that reserve `max_tokens`."""
OTHERS: Final = parse_policies("max,pow2,paged")
EXPLORED: Final = {
    "static/exact": "static batches, reserve max_tokens",
    "exact": "continuous, reserves max_tokens",
    "max": "continuous, reserves the longest",
    "pow2": "continuous, reserves powers of two",
    "paged": "continuous, paged",
}
"""The titles of the policies in the last chapter."""
MAX_EXPLORED: Final = 80


def page_data(lesson: Lesson, on_result: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """The data of the page.

    Args:
        on_result: called after each simulation of the last chapter, of which there are `num_results()`.
    """
    return {
        "load": summary.lesson_load(lesson),
        "machine": summary.lesson_machine(lesson),
        "policies": [{"name": policy.name, "title": TITLES[policy.name]} for policy in POLICIES],
        "runs": {name: [_record(event) for event in first_steps(run, lesson.events[name])]
                 for name, run in lesson.runs.items()},
        "sharing": [_record(event) for event in sharing_events()],
        "rows": summary.lesson_rows(lesson),
        "bars": summary.lesson_bars(lesson),
        "sources": summary.SOURCES,
        "reasons": summary.lesson_reasons(lesson),
        "explorer": explorer(lesson, on_result),
    }  # fmt: skip


def _record(event: Event) -> dict[str, Any]:
    return {"type": event.type, **asdict(event)}


def first_steps(run: RecordedRun, events: list[Event]) -> Iterator[Event]:
    """The events up to step MAX_STEPS, with the true output lengths in place of `max_tokens`, as in the table."""
    steps = iter(run.true_steps[:MAX_STEPS])
    for event in events:
        if isinstance(event, RequestArrived) and event.output_len is not None:
            yield replace(event, max_tokens=event.output_len)
        elif isinstance(event, Step):
            if (step := next(steps, None)) is None:
                return
            yield step
        else:
            yield event


class _OneSecondSteps:
    """A cost model by which every step takes a second."""

    def seconds(self, shape: StepShape) -> float:
        return 1.0


def sharing_events() -> list[Event]:
    """The events of four requests with a common prefix of three blocks. The first one computes it, in steps of one
    second."""
    arrivals = {"A": 0.0, "B": 2.0, "C": 2.0, "D": 5.0}
    prefix = list(synthetic_tokens("instructions", 12))
    workload = [
        WorkloadRequest(name, arrival, [*prefix, *synthetic_tokens(name, 3 + 2 * index)], 9 + index)
        for index, (name, arrival) in enumerate(arrivals.items())
    ]
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64)
    sim, log = SimConfig(config.scheduler_config(64), KVPool(32, 4, 64)), EventList()
    simulate(workload, sim, _OneSecondSteps(), log)
    return log.events


def num_results() -> int:
    """The number of simulations of the last chapter."""
    return len(SEATS) * len(SPREADS) * (len(DECLARING) * len(LIMITS) + len(OTHERS) - 1 + len(ORDERS))


def explorer(lesson: Lesson, on_result: Callable[[], object]) -> dict[str, Any]:
    """Results of the simulator for every position of the sliders, by "policy|seats|spread|max_tokens".

    Policies that do not reserve `max_tokens` have "" in its place, and "paged" has the order of the queue.
    """
    results: dict[str, dict[str, float]] = {}
    num_requests = min(lesson.options.num_prompts or MAX_EXPLORED, MAX_EXPLORED)
    for seats, (spread, lengths) in product(SEATS, SPREADS.items()):
        load = replace(lesson.options, num_prompts=num_requests, output_len=lengths, max_tokens=None)
        workload = load.workload(VOCAB_SIZE, token_round=1)
        cases = [(policy, name) for policy in DECLARING for name in LIMITS]
        cases += [(policy, name) for policy in OTHERS for name in (ORDERS if policy.name == "paged" else ("",))]
        for policy, name in cases:
            order = name if name in ORDERS else "fcfs"
            declared = declare(workload, LIMITS.get(name))
            run = lesson.simulate(
                policy, declared, max_num_seqs=seats, scheduling_policy=order, length_predictor="oracle"
            )
            results[f"{policy.name}|{seats}|{spread}|{name}"] = explored_values(run)
            on_result()
    return {
        "seats": SEATS,
        "spreads": list(SPREADS),
        "limits": list(LIMITS),
        "orders": ORDERS,
        "declaring": [policy.name for policy in DECLARING],
        "policies": [{"name": name, "title": title} for name, title in EXPLORED.items()],
        "num_requests": num_requests,
        "error": lesson.cost_model.error.median,
        "results": results,
    }


def explored_values(run: RecordedRun) -> dict[str, float]:
    """The values of one position of the sliders, with four digits."""
    metrics = run.metrics
    latency = metrics.e2e_latency
    assert latency is not None
    values = {
        "speed": metrics.output_tokens_per_s,
        "p50": latency.p50,
        "p99": latency.p99,
        "seats": metrics.mean_batch_size,
        "busy": metrics.mean_busy_seats,
        **run.waste().shares,
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}
