"""The default token budget: the largest one whose steps are short on this machine, found by timing a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from chairlift.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from chairlift.outputs import NewRequest, SchedulerOutput
from chairlift.sampling_params import SamplingParams
from chairlift.worker.model_runner import ModelRunner

TARGET_STEP_SECONDS: Final = 0.2
"""The limit of MLPerf Inference for Llama 2 70B (server scenario, 99th percentile of TPOT)."""

BUDGETS: Final = (64, 128, 256, DEFAULT_MAX_NUM_BATCHED_TOKENS)

PROBES: Final = (8, 32, 128)
"""Numbers of tokens of the chunks that are timed, within MEASURING_SECONDS."""

PROBE_CONTEXT: Final = 512
"""Number of tokens before such a chunk, if the model and the pool have room for them."""

REPEATS: Final = 2
"""Each chunk is timed this often, and the fastest time is used, because the first run touches new memory."""

MEASURING_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds of a step with one chunk, by its number of tokens in ascending order; at least one entry."""

    seconds: dict[int, float]

    def estimate(self, num_tokens: int) -> float:
        """Estimate the seconds of a step by linear interpolation or extrapolation, or in proportion to one entry."""
        points = list(self.seconds.items())
        if len(points) == 1:
            known, seconds = points[0]
            return seconds * num_tokens / known
        segments = list(pairwise(points))
        (low, below), (high, above) = next((s for s in segments if num_tokens <= s[1][0]), segments[-1])
        return below + (above - below) * (num_tokens - low) / (high - low)


def measure_steps(seconds_of: Callable[[int], float], longest: int) -> StepTimes | None:
    """Time chunks of increasing length, the shortest one always. Stop before a chunk whose estimated time would exceed
    MEASURING_SECONDS in total.

    Args:
        seconds_of: runs a chunk with this number of tokens and returns its time.
        longest: number of tokens of the longest chunk that fits.

    Returns:
        The times; None if not even the shortest chunk fits.
    """
    times = StepTimes({})
    spent = 0.0
    for num_tokens in (probe for probe in PROBES if probe <= longest):
        if times.seconds and spent + REPEATS * times.estimate(num_tokens) > MEASURING_SECONDS:
            break
        measured = [seconds_of(num_tokens) for _ in range(REPEATS)]
        times.seconds[num_tokens] = min(measured)
        spent += sum(measured)
    return times if times.seconds else None


def largest_budget(times: StepTimes, max_num_seqs: int) -> int:
    """The largest of BUDGETS with room for all seats and steps of at most TARGET_STEP_SECONDS; if there is none, the
    smallest with room for all seats."""
    budgets = [budget for budget in BUDGETS if budget >= max_num_seqs] or [max_num_seqs]
    return max((budget for budget in budgets if times.estimate(budget) <= TARGET_STEP_SECONDS), default=budgets[0])


class ChunkTimer:
    """Runs chunks of a prompt in the first blocks of a pool that is not in use yet.

    Args:
        runner: a runner without requests.
        max_model_len: maximum number of tokens of a request.

    Attributes:
        longest: number of tokens of the longest chunk; one token remains uncomputed, so that nothing is sampled.
    """

    def __init__(self, runner: ModelRunner, max_model_len: int, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self.longest = max_model_len - 1

    def seconds_of(self, num_tokens: int) -> float:
        """Run one step with a chunk of this number of tokens; returns its seconds."""
        context = min(PROBE_CONTEXT, self.longest - num_tokens)
        num_prompt_tokens = context + num_tokens + 1
        blocks = list(range(-(-num_prompt_tokens // self._block_size)))
        tokens = [0] * num_prompt_tokens
        request = NewRequest("probe", tokens, num_prompt_tokens, context, blocks, SamplingParams(), 0, [])
        started = time.perf_counter()
        self._runner.result(self._runner.submit(SchedulerOutput(0, {"probe": num_tokens}, [request])))
        seconds = time.perf_counter() - started
        self._runner.submit(SchedulerOutput(1, {}, removed=["probe"]))
        return seconds
