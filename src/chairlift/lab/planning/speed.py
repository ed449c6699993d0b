"""How fast a planned engine would be: single steps from a cost model, a load from a short simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from chairlift.engine.startup.pool_capacity import RequestLengths
from chairlift.lab.metrics.run import RunMetrics, RunTally
from chairlift.lab.sim.cost_model import CostModel, StepShape
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import arrival_process
from chairlift.lab.workload.request import WorkloadRequest

MIN_LOAD: Final = 32
MAX_LOAD_TOKENS: Final = 300_000
"""What is simulated under load: four full batches, and at least MIN_LOAD requests; less where their output tokens are
more than that."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What to expect, in seconds.

    Attributes:
        constants: of the cost model.
        batch_size: requests that decode together in the next four.
        num_context: tokens whose K and V they read half way through their outputs.
        itl: a step of that batch then; itl_longest: all at their last token.
        decode_tokens_per_s: output tokens of that batch, prompts not counted.
        ttft_alone: of one request of mean lengths on an idle engine.
        load: in words; run: what the simulated load gave.
    """

    constants: list[tuple[str, str]]
    batch_size: int
    num_context: int
    itl: float
    itl_longest: float
    decode_tokens_per_s: float
    ttft_alone: float | None
    load: str
    run: RunMetrics

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)


def plan_speed(
    cost_model: CostModel,
    config: SimConfig,
    lengths: Sequence[RequestLengths],
    batch_size: int,
    request_rate: float | None = None,
    seed: int = 0,
) -> Speed:
    """Ask a cost model and the simulator.

    Args:
        lengths: of requests as they come, of `take_load`.
        batch_size: requests that run at once, at least 1.
        request_rate: Poisson arrivals a second of the simulated load; None: all at once.

    Raises:
        ConfigError: request_rate is not positive.
    """
    batch = list(islice(lengths, batch_size))
    half = sum(prompt + (output + 1) // 2 for prompt, output, _ in batch)
    longest = sum(prompt + output - 1 for prompt, output, _ in batch)
    itl = cost_model.seconds(_decode(len(batch), half))
    return Speed(
        constants=cost_model.constants(),
        batch_size=len(batch),
        num_context=half,
        itl=itl,
        itl_longest=cost_model.seconds(_decode(len(batch), longest)),
        decode_tokens_per_s=len(batch) / itl,
        ttft_alone=_ttft_alone(cost_model, config, lengths),
        load=f"{len(lengths)} requests " + ("at once" if request_rate is None else f"at {request_rate:g}/s"),
        run=_run(cost_model, config, lengths, request_rate, seed),
    )


def take_load(lengths: Iterable[RequestLengths], batch_size: int) -> list[RequestLengths]:
    """The first of these that the simulated load consists of."""
    taken: list[RequestLengths] = []
    num_tokens = 0
    for length in lengths:
        taken.append(length)
        num_tokens += length.output
        if len(taken) >= max(MIN_LOAD, 4 * batch_size):
            break
        if len(taken) >= max(MIN_LOAD, batch_size) and num_tokens > MAX_LOAD_TOKENS:
            break
    return taken


def _decode(num_seqs: int, num_context: int) -> StepShape:
    return StepShape(num_seqs, num_seqs, num_seqs, num_context, num_context)


def _ttft_alone(cost_model: CostModel, config: SimConfig, lengths: Sequence[RequestLengths]) -> float | None:
    """None if a request of mean lengths is refused, though others are not."""
    prompt = sum(length.prompt for length in lengths) // len(lengths)
    output = sum(length.output for length in lengths) // len(lengths)
    run = _run(cost_model, config, [RequestLengths(prompt, output, output)], None, 0)
    return None if run.ttft is None else run.ttft.mean


def _run(
    cost_model: CostModel, config: SimConfig, lengths: Sequence[RequestLengths], request_rate: float | None, seed: int
) -> RunMetrics:
    times = arrival_process(request_rate).times(np.random.default_rng(seed), len(lengths))
    workload = [
        WorkloadRequest(str(index), time, [index] * length.prompt, length.output, max_tokens=length.max_tokens)
        for index, (time, length) in enumerate(zip(times, lengths, strict=True))
    ]
    tally = RunTally()
    simulate(workload, config, cost_model, tally)
    return tally.result()
