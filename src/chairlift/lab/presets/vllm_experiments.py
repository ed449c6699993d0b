"""The experiments of the vLLM paper with OPT-13B (Kwon et al., SOSP'23, sections 6.1 and 6.2).

This module contains the engine configurations, the requests, and the means over the steady state of a run.

Lengths are drawn independently from the two histograms of Figure 11, because the paper does not publish which prompt
belongs to which output. No value here was chosen after seeing a result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from chairlift.config import SchedulerConfig
from chairlift.errors import ConfigError
from chairlift.events import Event, Step
from chairlift.lab.presets import PresetOptions
from chairlift.lab.presets.capacity import at_rate
from chairlift.lab.sim.devices import DEVICES
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import HistogramLengths, paired_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.observability.tracker import SLOT_KINDS

MODEL: Final = "opt-13b"
DEVICE: Final = "A100-40GB"
NUM_SLOTS: Final = 15_728
"""12 GiB of K and V at 800 KiB per token (Table 1: 15.7K)."""
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 2048
MAX_NUM_SEQS: Final = 256
MAX_NUM_BATCHED_TOKENS: Final = 2560
"""Seats and token budget are the defaults of the first vLLM release."""

DATASETS: Final = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
RATES: Final = {"sharegpt": 2.0, "alpaca": 30.0}
"""Requests per second in Figure 13."""

POLICIES: Final = {"max": "Orca (Max)", "pow2": "Orca (Pow2)", "oracle": "Orca (Oracle)", "paged": "vLLM"}
"""The values of `--kv` and the names in the paper."""

NUM_SEEDS: Final = 3

WARM_UP_SHARE: Final = 0.1
"""The share of the requests that are admitted before the first counted step."""

COUNTED: Final = ("counted", "steps from the admission of the first tenth of them until all but the last are admitted")
"""A row of the constants of presets that use `steady_state`."""


def cost_model(model: str = MODEL) -> Roofline:
    """Returns the cost model of a published model on the paper's device."""
    return Roofline(model_shape(model), DEVICES[DEVICE])


def sim_config(
    kv: str,
    *,
    block_size: int = BLOCK_SIZE,
    static_batch_size: int | None = None,
    enable_prefix_caching: bool = False,
    model: str = MODEL,
) -> SimConfig:
    """Returns an engine with NUM_SLOTS slots in full blocks, and a buddy arena for reservations.

    Args:
        static_batch_size: None: continuous batching.
        enable_prefix_caching: off by default, because the paper shares blocks in a few experiments only.
    """
    limits = SchedulerConfig(MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    if static_batch_size is not None:
        limits = replace(limits, batching="static", static_batch_size=static_batch_size)
    return SimConfig(
        limits,
        num_blocks=NUM_SLOTS // block_size,
        block_size=block_size,
        kv=kv,
        enable_prefix_caching=enable_prefix_caching,
        model=model_shape(model),
    )


def constants(model: str = MODEL) -> list[tuple[str, str]]:
    """Returns the constants that all presets of the paper print."""
    pool = f"{NUM_SLOTS:,} slots = {NUM_SLOTS // BLOCK_SIZE} blocks of {BLOCK_SIZE}; reservations: buddy arena"
    return [
        ("KV pool", pool),
        ("max_model_len", f"{MAX_MODEL_LEN}"),
        ("max_num_seqs", f"{MAX_NUM_SEQS}"),
        ("max_num_batched_tokens", f"{MAX_NUM_BATCHED_TOKENS}"),
        ("lengths", f"histograms of Figure 11, independent, pairs above {MAX_MODEL_LEN} drawn again"),
        *cost_model(model).constants(),
    ]


def prompt_counts(options: PresetOptions, defaults: Mapping[str, int]) -> tuple[dict[str, int], str]:
    """Returns the number of requests by data set, and its text for the constants."""
    counts = {dataset: options.num_prompts or count for dataset, count in defaults.items()}
    return counts, ", ".join(f"{count:,} {DATASETS[dataset]}" for dataset, count in counts.items())


def draw_requests(dataset: str, seed: int, count: int) -> list[WorkloadRequest]:
    """Returns `count` requests of a data set (see DATASETS) that arrive once per second on average.

    Lengths and relative gaps stay the same when `at_rate` changes the rate, so two rates or two policies differ in
    nothing else. The tokens of the prompts are zeros, which no policy without a prefix cache reads.
    """
    prompt, output = HistogramLengths.load(f"{dataset}-input"), HistogramLengths.load(f"{dataset}-output")
    pairs = paired_lengths(prompt, output, MAX_MODEL_LEN, np.random.default_rng([seed, 0]), count)
    times = ArrivalProcess(1.0).times(np.random.default_rng([seed, 1]), count)
    return [
        WorkloadRequest(f"r{index}", time, bytes(prompt_len), output_len)
        for index, (time, (prompt_len, output_len)) in enumerate(zip(times, pairs, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Means over the counted steps of a run.

    Attributes:
        batch: running requests, every step with equal weight.
        batch_by_time: running requests, every step weighted by its duration.
        shares: slots by kind (see SLOT_KINDS and `core.kv.accounting`), in percent of the pool.
        saved: slots saved by sharing, in percent of the slots that would be held without it.
        requests_per_s: finished requests per second of the steps.
    """

    batch: float
    batch_by_time: float
    shares: dict[str, float]
    saved: float
    requests_per_s: float


class SteadyStateTally:
    """An event sink that adds up the steps between the admission of WARM_UP_SHARE of the requests and of the last one.

    If all requests arrive at once, the queue is not empty after any of these steps. The kinds of slots need no
    correction at the end, because the length of every request is forced and equals its declared limit.
    """

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._admitted: set[str] = set()
        self._num_steps = self._num_rows = self._num_finished = self._num_saved = self._num_held = 0
        self._seconds = self._row_seconds = 0.0
        self._slots = dict.fromkeys(SLOT_KINDS, 0)

    def emit(self, event: Event) -> None:
        if isinstance(event, Step) and len(self._admitted) < self._num_requests:
            self._admitted.update(event.admitted)
            if WARM_UP_SHARE * self._num_requests <= len(self._admitted) < self._num_requests:
                self._add(event)

    def _add(self, step: Step) -> None:
        seconds = step.time - step.scheduled_time
        self._num_steps += 1
        self._num_rows += step.num_running
        self._seconds += seconds
        self._row_seconds += seconds * step.num_running
        self._num_finished += len(step.finished)
        self._num_saved += step.saved
        self._num_held += step.token_states + step.reserved + step.internal
        for kind in SLOT_KINDS:
            self._slots[kind] += getattr(step, kind)

    def result(self) -> SteadyState:
        """Returns the means of the counted steps.

        Raises:
            ConfigError: there are too few requests, so that no step is counted.
        """
        if not self._num_steps:
            raise ConfigError(
                f"num_prompts={self._num_requests} is too small: all requests were admitted at once. Use more than fit "
                f"into the KV memory together."
            )
        num_slots = sum(self._slots.values())
        return SteadyState(
            batch=self._num_rows / self._num_steps,
            batch_by_time=self._row_seconds / self._seconds,
            shares={kind: 100 * slots / num_slots for kind, slots in self._slots.items()},
            saved=100 * self._num_saved / (self._num_held + self._num_saved),
            requests_per_s=self._num_finished / self._seconds,
        )


def steady_state(kv: str, requests: Sequence[WorkloadRequest], rate: float = math.inf) -> SteadyState:
    """Simulates requests of `draw_requests` at `rate` requests per second; infinite: all at once."""
    tally = SteadyStateTally(len(requests))
    simulate(at_rate(requests, rate), sim_config(kv), cost_model(), tally)
    return tally.result()


class SeedStatistics(NamedTuple):
    """The mean of one value over several seeds, and the largest deviation from it."""

    mean: float
    deviation: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> SeedStatistics:
        mean = sum(values) / len(values)
        return cls(mean, max(abs(value - mean) for value in values))
