"""The runner of studies by request rate: measures at given rates, or the highest rate that meets a limit.

A study has `rates`, in requests per second, and then a row for each rate and system; or `loads`, which are shares of
the rate at which the first system finishes requests with a full queue. Without them all requests arrive at the start
("fixed batch"). Or it has `limits` by heading, and then a row for each system with the highest rate at
which all conditions of a limit hold:

    "at_most"    measures with their maximum, to which a case may add its own `at_most`; {"times_alone": N, ...} is a
                 multiple of the value of a single request
    "at_least"   measures with their minimum
    "value"      the measure to report at that rate instead of the rate

With `instances` of the engine, prefill and decode are disaggregated (`sim.disaggregation`), and a highest rate applies
to one instance. With `minutes` in the workload, a run at a rate has the requests of so many minutes,
and at least 200.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final

from chairlift.events import EventBroadcaster
from chairlift.lab.metrics.requests import RequestMetrics, RequestTally
from chairlift.lab.metrics.run import RunTally, Summary
from chairlift.lab.presets.measures import measure_memory, simulate_outputs
from chairlift.lab.presets.study import MeasuredValue, Row, Study, StudyResult, StudySystem, at_rate
from chairlift.lab.workload.request import WorkloadRequest

MIN_REQUESTS: Final = 200
"""Minimum number of requests at each rate of a workload with `minutes`, for a meaningful mean."""

TOLERANCE: Final = 0.02
"""The relative error of a highest rate, unless the study has another `tolerance`."""


def run(study: Study, advance: Callable[[], object]) -> StudyResult:
    """Simulate each system at the rates, with all requests at the start, or search its highest rates."""
    headings = {name: f"requests/s at {name}" for name in study.settings.get("limits", {})}
    result = StudyResult(study, headings=headings)
    # The requests per second that the first system finishes while its queue is not empty: the unit of `loads`.
    capacity = 0.0
    if "loads" in study.settings:
        capacity = measure_memory(next(study.systems()), study.seed, ["finished_per_s"])["finished_per_s"]
    for system in study.systems():
        requests = system.requests(study.seed)
        rates = {f"{rate:g}/s, ": rate for rate in system.rates}
        rates |= {f"load {load:g}, ": load * capacity for load in study.settings.get("loads", ())}
        if not rates and not system.limits:
            rates = {"": math.inf}
        for prefix, rate in rates.items():
            found = measure_run(system, requests, rate)
            result.add(system, {name: MeasuredValue(found[name]) for name in study.measures}, prefix)
        if system.limits:
            result.add(system, _highest_rates(study, system, requests))
        advance()
    return result


def _highest_rates(study: Study, system: StudySystem, requests: Sequence[WorkloadRequest]) -> Row:
    row: Row = {}
    measured = cache(lambda rate: measure_run(system, requests, rate))
    for name, limit in system.limits.items():
        bounds = {key: _bound(study, key, value) for key, value in limit["at_most"].items()}
        is_met = partial(_is_met, measured, bounds, limit.get("at_least", {}))
        rate = highest_rate(is_met, 1.0, study.settings.get("tolerance", TOLERANCE))
        value = measured(rate)[limit["value"]] if rate and "value" in limit else rate / system.num_instances
        row[name] = MeasuredValue(value) if math.isfinite(value) else None
    return row


def _is_met(
    measured: Callable[[float], dict[str, float]], most: Mapping[str, float], least: Mapping[str, float], rate: float
) -> bool:
    found = measured(rate)
    return all(found[key] <= most[key] for key in most) and all(found[key] >= least[key] for key in least)


def _bound(study: Study, measure: str, value: float | Mapping[str, Any]) -> float:
    """A given limit, or a multiple of the value that a single request has in the first system of the study."""
    if not isinstance(value, Mapping):
        return value
    alone = WorkloadRequest("alone", 0.0, [0] * value["input_len"], value["output_len"])
    first = next(study.systems())
    return float(value["times_alone"] * measure_run(first, [alone], math.inf)[measure])


def measure_run(system: StudySystem, requests: Sequence[WorkloadRequest], rate: float) -> dict[str, float]:
    """Simulate requests of a system at a rate to their end, and return all measures. Every request must fit."""
    if (minutes := system.workload.get("minutes")) is not None and system.study.num_prompts is None:
        requests = requests[: max(MIN_REQUESTS, round(rate * 60 * minutes))]
    if system.instances is not None:
        latencies = system.instances.simulate(at_rate(requests, rate), system.config, system.cost_model)
        return latency_percentiles(latencies)
    tally, finished = RunTally(), list[RequestMetrics]()
    requests_tally = RequestTally(lambda _, metrics: finished.append(metrics))
    sinks = EventBroadcaster(tally, requests_tally)
    simulate_outputs(system, at_rate(requests, rate), sinks)
    values = {"itl_p99": 0.0, "swapped_blocks": 0.0} | tally.result().values()
    return values | {"completion_ratio": completion_ratio(finished)}


def latency_percentiles(requests: Sequence[RequestMetrics]) -> dict[str, float]:
    """The 90th percentiles of TTFT and TPOT; without the one of which no request has a value."""
    percentiles = {}
    for name in ("ttft", "tpot"):
        values = [value for request in requests if (value := getattr(request, name)) is not None]
        if (summary := Summary.from_values(values)) is not None:
            percentiles[f"{name}_p90"] = summary.p90
    return percentiles


def completion_ratio(finished: Sequence[RequestMetrics]) -> float:
    """Finished requests per arrival, between the arrivals of the middle request and of the last one.

    The queue time alone shows an overload only when all seats are in use. Beams that have never run are not counted.
    """
    finished = [request for request in finished if request.token_times]
    arrivals = sorted(request.arrival for request in finished)
    start, end = arrivals[len(arrivals) // 2], arrivals[-1]
    num_ended = sum(start < request.token_times[-1] <= end for request in finished)
    num_arrived = sum(start < arrival <= end for arrival in arrivals)
    return num_ended / num_arrived if num_arrived else 1.0


def highest_rate(is_met: Callable[[float], bool], start: float, tolerance: float = TOLERANCE) -> float:
    """Search the highest request rate at which a condition is met, if it is met at no higher one.

    The search doubles or halves `start` until the rate is enclosed, then halves the range on a logarithmic scale.

    Args:
        is_met: whether the condition is met at a rate in requests per second.
        start: the first rate.
        tolerance: the condition is not met at a rate that is higher by this share.

    Returns:
        0.0 if it is not met at a thousandth of `start`, infinity if it is met at a thousand times `start`.
    """
    low = high = start
    if is_met(start):
        while is_met(high := low * 2):
            low = high
            if low > 1000 * start:
                return math.inf
    else:
        while not is_met(low := high / 2):
            high = low
            if high < start / 1000:
                return 0.0
    while high > low * (1 + tolerance):
        rate = math.sqrt(low * high)
        if is_met(rate):
            low = rate
        else:
            high = rate
    return low
