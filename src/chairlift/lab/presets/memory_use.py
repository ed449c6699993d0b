"""The measures of studies of KV memory: slots by use, running requests and throughput in the steady state of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

from chairlift.errors import ConfigError
from chairlift.events import SLOT_KINDS, Event, EventSink, Step
from chairlift.lab.presets.study import StudySystem, at_rate
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

WARM_UP_SHARE: Final = 0.1
"""The share of the requests that are admitted before the first counted step."""


def measure(system: StudySystem, seed: int) -> dict[str, float]:
    """Simulate a system at the rate of the workload, or with all requests at once."""
    return measure_memory(system, seed, system.study.measures)


def measure_memory(system: StudySystem, seed: int, measures: Sequence[str]) -> dict[str, float]:
    """Simulate the requests of a system, and return the measures (see `SteadyStateTally`)."""
    requests = system.requests(seed)
    tally = SteadyStateTally(system.workload.get("num_outputs", 1) * len(requests))
    simulate_outputs(system, at_rate(requests, system.workload.get("request_rate", math.inf)), tally)
    return {name: tally.value(name) for name in measures}


class SteadyStateTally:
    """An event sink that adds up the steps between the admission of WARM_UP_SHARE of the requests and of the last one.

    If all requests arrive at once, the queue is not empty after any of these steps. The kinds of slots need no
    correction at the end, because the length of every request is forced and equals its declared limit.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._admitted: set[str] = set()
        self._sums: Counter[str] = Counter()
        self._most_held = self._most_written = self._num_fitting = 0

    def emit(self, event: Event) -> None:
        if not isinstance(event, Step):
            return
        self._most_held = max(self._most_held, _held(event))
        self._most_written = max(self._most_written, event.token_states)
        if len(self._admitted) < self._num_requests:
            self._admitted.update(event.admitted)
            if WARM_UP_SHARE * self._num_requests <= len(self._admitted) < self._num_requests:
                seconds, rows = event.time - event.scheduled_time, event.num_running
                sums = {kind: getattr(event, kind) for kind in SLOT_KINDS}
                sums |= {"steps": 1, "rows": rows, "seconds": seconds, "row_seconds": rows * seconds}
                self._sums.update(sums, finished=len(event.finished), saved=event.saved, held=_held(event))
            num_slots = sum(getattr(event, kind) for kind in SLOT_KINDS)
            self._num_fitting = len(self._admitted) * num_slots // max(1, _held(event))

    def value(self, name: str) -> float:
        """Return a measure.

        Over the whole run: `held` and `written`, the largest numbers of slots that requests hold and that have tokens,
        and their difference `never_used`. Over the counted steps: `batch`, the running requests, with equal weights of
        the steps; `batch_by_time`, the same weighted by duration; `saved`, the slots saved by sharing in percent of
        those without it; `finished_per_s`; and the kinds of slots in percent of the pool, where `external` includes the
        free ones, and `waste` is all but `token_states`.

        Raises:
            ConfigError: there are too few requests, so that no step is counted.
        """
        peaks = {"held": self._most_held, "written": self._most_written}
        if name == "never_used":
            return peaks["held"] - peaks["written"]
        return peaks[name] if name in peaks else self._mean(name)

    def _mean(self, name: str) -> float:
        sums = self._sums
        if not sums["steps"]:
            raise ConfigError(
                f"num_prompts={self._num_requests} is too small: all requests were admitted at once. Use more than "
                f"{self._num_fitting}, which is about how many fit into the KV memory together."
            )
        num_slots = sum(sums[kind] for kind in SLOT_KINDS)
        shares = {kind: 100 * sums[kind] / num_slots for kind in SLOT_KINDS}
        shares["external"] += shares["free"]
        means = {
            "batch": sums["rows"] / sums["steps"],
            "batch_by_time": sums["row_seconds"] / sums["seconds"],
            "saved": 100 * sums["saved"] / (sums["held"] + sums["saved"]),
            "finished_per_s": sums["finished"] / sums["seconds"],
            "waste": 100 - shares["token_states"],
        }
        return (means | shares)[name]


def _held(step: Step) -> int:
    return step.token_states + step.reserved + step.internal


def simulate_outputs(system: StudySystem, items: Sequence[WorkloadRequest], events: EventSink) -> None:
    """Simulate requests in order of arrival, with the outputs per prompt of the workload.

    Memory that is reserved has no beam search, so that beams are independent outputs there.
    """
    count = system.workload.get("num_outputs", 1)
    has_beams = system.workload.get("beam_search", False) and system.config.pool.kv == "paged"
    requests_for = None if count == 1 else partial(siblings, count=count, has_beams=has_beams)
    result = simulate(items, system.config, system.cost_model, events, requests_for=requests_for)
    assert not result.rejected, result.rejected[0]


def siblings(item: WorkloadRequest, count: int, has_beams: bool) -> list[Request]:
    """Return `count` requests for the outputs or beams of one prompt, of which the first is the leader."""
    leader_id = f"{item.request_id}-0"
    params = SamplingParams(
        n=count if has_beams else 1, ignore_eos=True, max_tokens=item.output_len, use_beam_search=has_beams
    )
    return [
        Request(
            f"{item.request_id}-{index}",
            list(item.prompt_token_ids),
            params,
            item.output_len,
            arrival_time=item.arrival,
            leader_id=leader_id if index else None,
            output_len=item.output_len,
        )
        for index in range(count)
    ]
