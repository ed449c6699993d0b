"""Predicts the speed of a planned engine: single steps with a cost model, a workload with a short simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from chairlift.engine.startup.pool_capacity import RequestLengths
from chairlift.lab.metrics.run import RunMetrics, RunTally
from chairlift.lab.planning.planned_workload import PlannedWorkload
from chairlift.lab.sim.cost_model import CostModel, StepShape
from chairlift.lab.sim.kernel_roofline import KernelCost, KernelRoofline
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.request import WorkloadRequest

MIN_REQUESTS: Final = 32
"""Minimum number of simulated requests. The default is four full batches."""

MAX_OUTPUT_TOKENS: Final = 300_000
"""Number of output tokens after which no further request is simulated, if there is one full batch."""


@dataclass(frozen=True, slots=True)
class PredictedSpeed:
    """The predicted times in seconds.

    Attributes:
        constants: (name, value) of the cost model.
        batch_size: number of requests that decode together, for the next three fields.
        itl: time of their step in the middle of their outputs.
        kernels: the kernels of that step; empty on a CPU.
        itl_longest: time of their step if all are at their last token.
        decode_tokens_per_s: output tokens per second without prompts.
        ttft_alone: TTFT of one request of mean lengths on an idle engine; None if such a request is rejected.
        load: description of the simulated workload.
        run: metrics of the simulated workload.
    """

    constants: list[tuple[str, str]]
    batch_size: int
    itl: float
    kernels: list[KernelCost]
    itl_longest: float
    decode_tokens_per_s: float
    ttft_alone: float | None
    load: str
    run: RunMetrics


def predict_speed(
    cost_model: Roofline,
    config: SimConfig,
    lengths: Iterable[RequestLengths],
    batch_size: int,
    load: PlannedWorkload,
) -> PredictedSpeed:
    """Predict the speed with a cost model and the simulator.

    Args:
        lengths: endless lengths of the requests, of which the first ones are simulated.
        batch_size: number of concurrent requests, at least 1.
        load: the arrivals and the seed of the simulated requests.
    """
    lengths = _simulated_lengths(lengths, batch_size)
    rate = load.request_rate
    batch = list(islice(lengths, batch_size))
    half = sum(prompt + (output + 1) // 2 for prompt, output, _ in batch)
    longest = sum(prompt + output - 1 for prompt, output, _ in batch)
    step = _decode(len(batch), half)
    itl = cost_model.seconds(step)
    return PredictedSpeed(
        constants=cost_model.constants(),
        batch_size=len(batch),
        itl=itl,
        kernels=cost_model.costs(step) if isinstance(cost_model, KernelRoofline) else [],
        itl_longest=cost_model.seconds(_decode(len(batch), longest)),
        decode_tokens_per_s=len(batch) / itl,
        ttft_alone=_ttft_alone(cost_model, config, lengths),
        load=f"{len(lengths)} requests " + ("at once" if rate is None else f"at {rate:g}/s"),
        run=_run(cost_model, config, lengths, rate, load.seed),
    )


def _simulated_lengths(lengths: Iterable[RequestLengths], batch_size: int) -> list[RequestLengths]:
    """The lengths, from the first, of the requests to simulate."""
    taken: list[RequestLengths] = []
    num_tokens = 0
    for length in lengths:
        taken.append(length)
        num_tokens += length.output
        if len(taken) >= max(MIN_REQUESTS, 4 * batch_size):
            break
        if len(taken) >= max(MIN_REQUESTS, batch_size) and num_tokens > MAX_OUTPUT_TOKENS:
            break
    return taken


def _decode(num_seqs: int, num_context: int) -> StepShape:
    return StepShape(num_seqs, num_seqs, num_seqs, num_context, num_context)


def _ttft_alone(cost_model: CostModel, config: SimConfig, lengths: Sequence[RequestLengths]) -> float | None:
    """Simulate one request of mean lengths; None if it is rejected."""
    prompt = sum(length.prompt for length in lengths) // len(lengths)
    output = sum(length.output for length in lengths) // len(lengths)
    run = _run(cost_model, config, [RequestLengths(prompt, output, output)], None, 0)
    return None if run.ttft is None else run.ttft.mean


def _run(
    cost_model: CostModel, config: SimConfig, lengths: Sequence[RequestLengths], request_rate: float | None, seed: int
) -> RunMetrics:
    times = ArrivalProcess(request_rate).times(np.random.default_rng(seed), len(lengths))
    workload = [
        WorkloadRequest(str(index), time, [index] * length.prompt, length.output, max_tokens=length.max_tokens)
        for index, (time, length) in enumerate(zip(times, lengths, strict=True))
    ]
    tally = RunTally()
    simulate(workload, config, cost_model, tally)
    return tally.result()
