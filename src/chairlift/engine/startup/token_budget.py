"""Measures the time of a few steps at the start of an engine, from which the scheduler derives the sizes of chunks."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Final

from chairlift.outputs import NewRequest, SchedulerOutput
from chairlift.sampling_params import SamplingParams
from chairlift.step_time import CHUNK_MULTIPLE, RowTime, StepTime
from chairlift.system.cpu_topology import allowed_cpus
from chairlift.worker.model_runner import ModelRunner

logger = logging.getLogger("chairlift")

DECODE_TARGET_SECONDS: Final = 0.2
"""The limit of MLPerf Inference for Llama 2 70B (server scenario, 99th percentile of TPOT)."""

PREFILL_TARGET_SECONDS: Final = 1.0
"""The limit of a step in which no request decodes. Larger chunks compute prompts at the same speed."""

PROBES: Final = (8, 32, 128)
"""Numbers of tokens of the chunks that are timed, within MEASURING_SECONDS."""

PROBE_CONTEXT: Final = 512
"""Number of tokens before such a chunk, if the maximum length has room for them."""

LONG_CONTEXT: Final = 4096
"""Number of tokens before the chunk whose additional time is spent in attention, with the same condition."""

REPEATS: Final = 2
"""Each chunk is timed this often, and the fastest time is used, because the first run touches new memory."""

MEASURING_SECONDS: Final = 0.25

MAX_ROUNDS: Final = 6
AGREEMENT: Final = 1.1
"""Largest ratio of the two fastest rounds that agree."""

REFERENCE_TOKENS: Final = 256
"""Tokens of the chunk by whose estimated time rounds are compared."""

ROW_PROBES: Final = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows of the steps whose time decides how many draft tokens pay."""

ROW_REPEATS: Final = 5

SecondsOf = Callable[[int, int], float]
"""Runs a chunk with a number of tokens after a number of tokens of context, and returns its time."""


def fit_step_time(measured: dict[int, float], context: int, per_pair: float) -> StepTime:
    """The line through the two longest chunks, without the attention to their context.

    Args:
        measured: seconds by the number of tokens of a chunk, in ascending order; at least one entry.
        context: number of tokens before these chunks.
        per_pair: seconds of attention for each token and each token of its context.
    """
    (shorter, below), (longest, seconds) = [(0, 0.0), *measured.items()][-2:]
    slope = (seconds - below) / (longest - shorter)
    # A measurement that was disturbed may be slower than a longer one, so each part is at least 0.
    per_token = max(slope, 0.0)
    fixed = max(seconds - per_token * longest, 0.0)
    per_pair = min(per_pair, per_token / context) if context else per_pair
    per_token -= per_pair * context
    return StepTime(fixed, per_token, per_pair, DECODE_TARGET_SECONDS, PREFILL_TARGET_SECONDS)


def measure_steps(seconds_of: SecondsOf, longest: int) -> StepTime | None:
    """Time chunks of increasing length, the two shortest ones always, because two points define a line. Stop before a
    chunk whose estimated time would exceed MEASURING_SECONDS in total. Then time the second one after a
    long context.

    Args:
        longest: number of tokens of the longest chunk and its context.

    Returns:
        The time of steps; None if not even the shortest chunk fits.
    """
    if longest < PROBES[0]:
        return None
    context = max(0, min(PROBE_CONTEXT, longest - PROBES[-1]))
    times: dict[int, float] = {}
    spent = 0.0
    for num_tokens in (probe for probe in PROBES if probe + context <= longest):
        if len(times) > 1:
            estimate = RowTime(times).seconds(num_tokens)
            if spent + REPEATS * estimate > MEASURING_SECONDS:
                break
        measured = [seconds_of(num_tokens, context) for _ in range(REPEATS)]
        times[num_tokens] = min(measured)
        spent += sum(measured)
    num_tokens, per_pair = PROBES[1], 0.0
    long_context = min(LONG_CONTEXT, longest - num_tokens)
    if num_tokens in times and long_context >= 2 * context + num_tokens:
        seconds = min(seconds_of(num_tokens, long_context) for _ in range(REPEATS))
        per_pair = max(seconds - times[num_tokens], 0.0) / (num_tokens * (long_context - context))
    return fit_step_time(times, context, per_pair)


def fastest_round(measure: Callable[[], StepTime | None]) -> StepTime | None:
    """Repeat a measurement until the two fastest results agree, at most MAX_ROUNDS times, and return the fastest one.

    Other processes make steps slower, never faster. A warning says if no two rounds agree. `StepTimeCorrection` later
    shortens times that are still too long.
    """
    rounds: list[StepTime] = []
    while len(rounds) < MAX_ROUNDS:
        if (step_time := measure()) is None:
            return None
        rounds.append(step_time)
        seconds = sorted(each.fixed + each.chunk_seconds(0, REFERENCE_TOKENS) for each in rounds)
        if len(rounds) > 1 and seconds[1] <= seconds[0] * AGREEMENT:
            break
    else:
        logger.warning(
            "the measured times of steps differ between %d rounds (%.0f to %.0f ms for %d tokens; load average %.1f on "
            "%d CPUs), so chunks of prompts may be small until the engine has computed faster steps for a minute: stop "
            "other work, or set max_num_batched_tokens",
            *(MAX_ROUNDS, seconds[0] * 1e3, seconds[-1] * 1e3, REFERENCE_TOKENS),
            *(os.getloadavg()[0], len(allowed_cpus())),
        )
    return min(rounds, key=lambda each: each.fixed + each.chunk_seconds(0, REFERENCE_TOKENS))


def measure_rows(seconds_of: SecondsOf, longest: int, max_rows: int | None = None) -> RowTime | None:
    """Time steps that sample at each of their rows.

    Args:
        seconds_of: runs a step with a number of rows after a number of tokens of context, and returns its time.
        longest: number of tokens of the longest request.
        max_rows: the maximum number of rows, if it is limited.

    Returns:
        The times; None if a request cannot even have two rows.
    """
    probes = [rows for rows in ROW_PROBES if rows <= min(longest, max_rows or longest)]
    if len(probes) < 2:
        return None
    context = max(0, min(PROBE_CONTEXT, longest - probes[-1]))
    times: dict[int, list[float]] = {rows: [] for rows in probes}
    for _ in range(ROW_REPEATS):
        for rows in probes:
            times[rows].append(seconds_of(rows, context))
    return RowTime({rows: median(seconds) for rows, seconds in times.items()})


def describe_rows(what: str, row_time: RowTime) -> str:
    """A line about the measured times, for the log."""
    times = ", ".join(f"{rows}: {seconds * 1e3:.1f} ms" for rows, seconds in row_time.points.items())
    return f"{what}: time of a step by its number of rows: {times}"


def describe_chunks(step_time: StepTime, budget: int, max_model_len: int) -> str:
    """A line about the chunks that a token budget and the time of steps allow, for the log."""

    def chunk(start: int, target: float) -> int:
        return min(budget, max(step_time.largest_chunk(start, target - step_time.fixed), CHUNK_MULTIPLE))

    def seconds(start: int, num_tokens: int) -> str:
        return f"{(step_time.fixed + step_time.chunk_seconds(start, num_tokens)) * 1e3:.0f} ms"

    alone, shared = chunk(0, PREFILL_TARGET_SECONDS), chunk(0, DECODE_TARGET_SECONDS)
    parts = [
        f"max_num_batched_tokens={budget}: on this machine chunks of a prompt have up to {alone} tokens "
        f"({seconds(0, alone)} per step; target: at most {PREFILL_TARGET_SECONDS * 1e3:.0f} ms), and up to {shared} "
        f"({seconds(0, shared)}; target: {DECODE_TARGET_SECONDS * 1e3:.0f} ms) while other requests decode"
    ]
    if (start := max_model_len // 2) >= LONG_CONTEXT:
        alone, shared = chunk(start, PREFILL_TARGET_SECONDS), chunk(start, DECODE_TARGET_SECONDS)
        parts.append(f"after {start} tokens of context: {alone} ({seconds(start, alone)}) and {shared}")
    return "; ".join(parts)


class ChunkTimer:
    """Runs chunks of a prompt in the first blocks of a pool that is not in use yet.

    Args:
        runner: a runner without requests.
        max_model_len: maximum number of tokens of a request.
        num_blocks: number of blocks of the pool.
        num_groups: number of groups of layers, which share the blocks, because only the time counts.
        turn: is held while a step runs.

    Attributes:
        longest: number of tokens of the longest chunk; one token remains uncomputed, so that nothing is sampled.
    """

    def __init__(
        self,
        runner: ModelRunner,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        num_groups: int = 1,
        turn: AbstractContextManager[None] | None = None,
    ) -> None:
        self._turn = turn or nullcontext()
        self._runner = runner
        self._num_groups = num_groups
        self._block_size = block_size
        self._num_blocks = min(num_blocks, -(-(PROBE_CONTEXT + PROBES[-1] + 1) // block_size))
        self.longest = max_model_len - 1

    def seconds_of(self, num_tokens: int, context: int) -> float:
        """Run one step with a chunk of this number of tokens after `context` tokens; returns its seconds.

        A long context repeats the same blocks, so that the memory of others is not claimed.
        """
        return self._seconds(num_tokens, [], context, num_known=context + num_tokens + 1)

    def sampled_seconds_of(self, num_rows: int, context: int) -> float:
        """Run one step that verifies `num_rows` - 1 draft tokens after `context` tokens; returns its seconds."""
        return self._seconds(num_rows, [0] * (num_rows - 1), context, num_known=context + 1)

    def _seconds(self, num_tokens: int, drafts: list[int], context: int, num_known: int) -> float:
        blocks = [i % self._num_blocks for i in range(-(-(context + num_tokens + 1) // self._block_size))]
        tables = [blocks] * self._num_groups
        request = NewRequest("probe", [0] * num_known, num_known, context, tables, SamplingParams(), 0, [])
        draft_token_ids = {"probe": drafts} if drafts else {}
        output = SchedulerOutput(0, {"probe": num_tokens}, [request], draft_token_ids=draft_token_ids)
        with self._turn:
            started = time.perf_counter()
            self._runner.result(self._runner.submit(output))
            seconds = time.perf_counter() - started
        self._runner.submit(SchedulerOutput(1, {}, removed=["probe"]))
        return seconds
