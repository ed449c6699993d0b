"""Runs the requests of the lesson on the engine under each policy, and on the simulator.

The lesson repeats the experiment of Kwon et al., SOSP'23, Figure 2, at an eighth of its size: lengths with the means of
ShareGPT (161 prompt and 338 output tokens), 15,728 KV slots and max_model_len=2048 are all divided by eight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.events import EngineStarted, Event, EventBroadcaster, EventList, EventSink
from chairlift.lab.bench.bench_options import CompareOptions
from chairlift.lab.bench.benchmark_result import BenchmarkResult, RunValues
from chairlift.lab.bench.compare import TokenCheck, run_compare, with_max_tokens
from chairlift.lab.bench.policies import ComparedPolicy, parse_policies
from chairlift.lab.bench.simulation import sim_config_from_recording
from chairlift.lab.bench.workload_options import Tokenize
from chairlift.lab.report.recorded_run import RecordedRun, recorded_run
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.fitted_cost_model import FittedCostModel, fit_cost_model
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.request import WorkloadRequest

POLICIES: Final = parse_policies("static,max,exact,pow2,paged")
"""The policies in the order of the lesson; the first one is the baseline."""

TITLES: Final = {
    "static": "static batches",
    "max": "continuous, max",
    "exact": "continuous, exact",
    "pow2": "continuous, pow2",
    "paged": "continuous, paged",
}

VOCAB_SIZE: Final = 1 << 15
"""Of simulated requests, whose tokens only have to differ."""

GENEROUS_MAX_TOKENS: Final = 112
"""2.7 times the mean answer. From 128 on, the allocator's rounding would give `exact` the reservations of `max`."""

LOAD: Final = {"input_len": "exp:20,1..96", "output_len": "exp:42,1..160"}
ENGINE: Final = {"block_size": 4, "num_kv_blocks": 491, "max_model_len": 256, "max_num_seqs": 64}


def lesson_config(**changes: Any) -> EngineConfig:
    """The engine that all policies of the lesson share."""
    return EngineConfig(**{**ENGINE, **changes})


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonOptions(CompareOptions):
    """The requests of the lesson, whose `max_tokens` is that of the clients, or the length of a longer answer."""

    def workload(
        self, vocab_size: int, token_round: int, tokenize: Tokenize | None = None, max_model_len: int | None = None
    ) -> list[WorkloadRequest]:
        undeclared = replace(self, max_tokens=None)
        workload = CompareOptions.workload(undeclared, vocab_size, token_round, tokenize, max_model_len)
        return declare(workload, self.max_tokens)


def declare(workload: Sequence[WorkloadRequest], max_tokens: int | None) -> list[WorkloadRequest]:
    """Requests that declare `max_tokens`, and those with longer answers their length. None leaves it undeclared."""
    if max_tokens is None:
        return list(workload)
    return [replace(item, max_tokens=max(max_tokens, item.output_len)) for item in workload]


def lesson_options(
    seed: int, num_requests: int, max_tokens: int = GENEROUS_MAX_TOKENS, **changes: Any
) -> LessonOptions:
    """The requests of the lesson, all of which are served under each policy."""
    settings = {**LOAD, "repeats": 1, "num_warmups": 2, **changes}
    return LessonOptions(policies=POLICIES, seed=seed, num_prompts=num_requests, max_tokens=max_tokens, **settings)


@dataclass(frozen=True)
class Lesson:
    """The measured runs of the lesson.

    Attributes:
        events: the events of each run by policy, in the order of POLICIES.
    """

    options: LessonOptions
    result: BenchmarkResult
    tokens: TokenCheck
    events: Mapping[str, list[Event]]

    @cached_property
    def runs(self) -> dict[str, RecordedRun]:
        """The runs by policy."""
        return {name: recorded_run(events, TITLES[name]) for name, events in self.events.items()}

    @cached_property
    def cost_model(self) -> FittedCostModel:
        """The times of steps on this machine, for simulations."""
        return fit_cost_model([event for events in self.events.values() for event in events], "the runs of the lesson")

    def values(self, policy: str) -> RunValues:
        """The values of a run by metric, as in `bench compare`."""
        return self.result.runs[policy][0]

    @property
    def started(self) -> EngineStarted:
        """The configuration of the paged run."""
        return self.result.engines["paged"]

    def simulate(self, policy: ComparedPolicy, workload: Sequence[WorkloadRequest], **limits: Any) -> RecordedRun:
        """Simulate other requests under a policy, in the same memory and with the step times of this machine.

        Args:
            limits: fields of `EngineConfig` that replace the values of the lesson.
        """
        return recorded_run(simulated_events(self.started, self.cost_model, policy, workload, **limits))


def simulated_events(
    started: EngineStarted, cost: CostModel, policy: ComparedPolicy, workload: Sequence[WorkloadRequest], **limits: Any
) -> list[Event]:
    """The events of a simulation with the real scheduler, on the engine that `started` describes.

    Args:
        workload: requests without `max_tokens` declare all that max_model_len allows.
        limits: fields of `EngineConfig` that replace the engine's values; a static batch has `max_num_seqs` requests.
    """
    config = EngineConfig(**{"max_num_seqs": started.max_num_seqs, **limits})
    config = policy.config(config, limits.get("max_num_seqs"), None)
    sim, log = sim_config_from_recording(config, started), EventList()
    simulate(with_max_tokens(workload, started.max_model_len), sim, cost, log)
    return log.events


class RemainingTime:
    """An event sink that estimates the rest of the lesson when its first run has ended.

    Args:
        num_simulations: the number of simulations after the runs.
        on_estimate: called once, with the seconds.
    """

    def __init__(self, options: LessonOptions, num_simulations: int, on_estimate: Callable[[float], object]) -> None:
        self._options = options
        self._num_simulations = num_simulations
        self._on_estimate = on_estimate
        self._first_run: list[Event] | None = []

    def emit(self, event: Event) -> None:
        if self._first_run is None:
            return
        if isinstance(event, EngineStarted) and self._first_run:
            self._on_estimate(self._estimate(self._first_run))
            self._first_run = None
        else:
            self._first_run.append(event)

    def _estimate(self, events: list[Event]) -> float:
        """The simulated seconds of the other runs, and the seconds of as many simulations as will follow."""
        started, *_ = events
        assert isinstance(started, EngineStarted)
        cost, workload = fit_cost_model(events), self._options.workload(VOCAB_SIZE, token_round=1)
        begin = time.perf_counter()
        others = [recorded_run(simulated_events(started, cost, policy, workload)) for policy in POLICIES[1:]]
        seconds = (time.perf_counter() - begin) / len(others)
        return sum(run.metrics.duration for run in others) + seconds * self._num_simulations


def run_lesson(config: EngineConfig, options: LessonOptions, *progress: EventSink) -> Lesson:
    """Run the requests on the engine, under one policy after the other.

    Args:
        progress: receive the events of all runs as they happen.

    Raises:
        ConfigError: an option cannot be honoured.
        ModelLoadError: the model cannot be loaded.
    """
    log = EventList()
    result, tokens = run_compare(config, replace(options, repeats=1), EventBroadcaster(log, *progress))
    starts = [index for index, event in enumerate(log.events) if isinstance(event, EngineStarted)]
    runs = [log.events[start:end] for start, end in pairwise([*starts, len(log.events)])]
    names = [policy.name for policy in options.policies]
    return Lesson(options, result, tokens, dict(zip(names, runs, strict=True)))
