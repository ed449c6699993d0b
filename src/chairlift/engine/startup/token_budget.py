"""The token budget that nobody gave: the largest whose steps stay short, after a few steps on the machine itself."""

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
"""What MLPerf Inference allows between two tokens of Llama 2 70B (server scenario, 99th percentile of TPOT)."""

BUDGETS: Final = (64, 128, 256, DEFAULT_MAX_NUM_BATCHED_TOKENS)

PROBES: Final = (8, 32, 128)
"""Tokens of the chunks that are timed, as far as PATIENCE_SECONDS reach."""

PROBE_CONTEXT: Final = 512
"""Where in its prompt such a chunk stands, if the model and the pool have so much room."""

REPEATS: Final = 2
"""The first one finds memory that was never touched; the faster one counts."""

PATIENCE_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step that computes a chunk of a prompt, by its tokens, ascending; at least one."""

    seconds: dict[int, float]

    def of(self, num_tokens: int) -> float:
        """By the line through the neighbours; in proportion to the only one."""
        points = list(self.seconds.items())
        if len(points) == 1:
            known, seconds = points[0]
            return seconds * num_tokens / known
        segments = list(pairwise(points))
        (low, below), (high, above) = next((s for s in segments if num_tokens <= s[1][0]), segments[-1])
        return below + (above - below) * (num_tokens - low) / (high - low)


def measure_steps(seconds_of: Callable[[int], float], longest: int) -> StepTimes | None:
    """Time chunks of growing length, for PATIENCE_SECONDS at most but for the shortest.

    Args:
        seconds_of: runs a chunk of so many tokens.
        longest: chunk that there is room for.

    Returns:
        None: there is no room for the shortest.
    """
    times = StepTimes({})
    spent = 0.0
    for num_tokens in (probe for probe in PROBES if probe <= longest):
        if times.seconds and spent + REPEATS * times.of(num_tokens) > PATIENCE_SECONDS:
            break
        measured = [seconds_of(num_tokens) for _ in range(REPEATS)]
        times.seconds[num_tokens] = min(measured)
        spent += sum(measured)
    return times if times.seconds else None


def largest_budget(times: StepTimes, max_num_seqs: int) -> int:
    """The largest of BUDGETS that has room for all seats and whose steps keep to TARGET_STEP_SECONDS; the smallest with
    room if none does."""
    budgets = [budget for budget in BUDGETS if budget >= max_num_seqs] or [max_num_seqs]
    return max((budget for budget in budgets if times.of(budget) <= TARGET_STEP_SECONDS), default=budgets[0])


class ChunkTimer:
    """Runs chunks of a prompt in the first blocks of a pool that nobody uses yet.

    Args:
        runner: without requests.
        room: tokens that a request can have, in the model and in the pool.
    """

    def __init__(self, runner: ModelRunner, room: int, block_size: int) -> None:
        self._runner = runner
        self._room = room
        self._block_size = block_size

    @property
    def longest(self) -> int:
        """Tokens of the longest chunk: one is left to be computed later, so that nothing is sampled."""
        return self._room - 1

    def seconds_of(self, num_tokens: int) -> float:
        """Of one step with a chunk of so many tokens."""
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
