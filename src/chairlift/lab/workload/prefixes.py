"""Workloads whose prompts have a beginning in common: shared prefixes, and conversations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import LengthDistribution
from chairlift.lab.workload.request import WorkloadRequest


def shared_prefixes(
    seed: int,
    count: int,
    num_prefixes: int,
    prefix: LengthDistribution,
    suffix: LengthDistribution,
    output: LengthDistribution,
    arrivals: ArrivalProcess,
    vocab_size: int,
    *,
    zipf: float = 0.0,
) -> list[WorkloadRequest]:
    """`count` requests; each prompt is one of `num_prefixes` prefixes and then tokens of its own.

    Args:
        zipf: the i-th prefix is chosen with a chance in proportion to 1 / i**zipf; 0: all alike.

    Raises:
        ConfigError: a number below its limit, or as LengthDistribution.sample.
    """
    _at_least(("count", count, 1), ("num_prefixes", num_prefixes, 1), ("vocab_size", vocab_size, 1), ("seed", seed, 0))
    if not (zipf >= 0 and math.isfinite(zipf)):
        raise ConfigError(f"workload: zipf must be a number >= 0, got {zipf}")
    prefix_rng, suffix_rng, output_rng, arrival_rng, choice_rng, token_rng = _streams(seed, 6)
    prefixes = [_tokens(token_rng, n, vocab_size) for n in prefix.sample(prefix_rng, num_prefixes)]
    chances = np.arange(1, num_prefixes + 1) ** -zipf
    chosen = choice_rng.choice(num_prefixes, size=count, p=chances / chances.sum()).tolist()
    suffix_lens = suffix.sample(suffix_rng, count)
    output_lens = output.sample(output_rng, count)
    times = arrivals.times(arrival_rng, count)
    return [
        WorkloadRequest(
            f"r{i}", times[i], prefixes[chosen[i]] + _tokens(token_rng, suffix_lens[i], vocab_size), output_lens[i]
        )
        for i in range(count)
    ]


@dataclass(frozen=True, slots=True)
class ThinkTime:
    """Seconds between an answer and the next message: gamma-distributed with that mean and shape. Shape 1 is the
    exponential distribution, more is steadier, infinite is always the mean."""

    mean: float = 0.0
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not (self.mean >= 0 and math.isfinite(self.mean)):
            raise ConfigError(f"think time: mean must be a number of seconds >= 0, got {self.mean}")
        if not self.shape > 0:
            raise ConfigError(f"think time: shape must be positive, got {self.shape}")

    def sample(self, rng: np.random.Generator, count: int) -> list[float]:
        """`count` independent times in seconds."""
        if self.mean == 0 or self.shape == math.inf:
            return [self.mean] * count
        times: list[float] = rng.gamma(self.shape, self.mean / self.shape, count).tolist()
        return times


def conversations(
    seed: int,
    count: int,
    turns: LengthDistribution,
    message: LengthDistribution,
    output: LengthDistribution,
    arrivals: ArrivalProcess,
    vocab_size: int,
    *,
    think_time: ThinkTime = ThinkTime(),
    system_prompt_len: int = 0,
) -> list[WorkloadRequest]:
    """`count` conversations; a request is a turn, and its prompt is everything said before and a message of its own.

    Args:
        turns: turns of a conversation; message: tokens of each message; output: of each answer.
        arrivals: of the conversations' first turns.
        think_time: between the end of an answer and the next turn.
        system_prompt_len: tokens that stand before all conversations, the same for all.

    Raises:
        ConfigError: a number below its limit, or as LengthDistribution.sample.
    """
    _at_least(("count", count, 1), ("vocab_size", vocab_size, 1), ("seed", seed, 0))
    _at_least(("system_prompt_len", system_prompt_len, 0))
    turns_rng, message_rng, output_rng, arrival_rng, think_rng, token_rng = _streams(seed, 6)
    num_turns = turns.sample(turns_rng, count)
    message_lens = iter(message.sample(message_rng, sum(num_turns)))
    output_lens = iter(output.sample(output_rng, sum(num_turns)))
    thinking = iter(think_time.sample(think_rng, sum(num_turns)))
    system_prompt = _tokens(token_rng, system_prompt_len, vocab_size)
    requests: list[WorkloadRequest] = []
    for i, start in enumerate(arrivals.times(arrival_rng, count)):
        for turn in range(num_turns[i]):
            own, pause = _tokens(token_rng, next(message_lens), vocab_size), next(thinking)
            name, output_len = f"c{i}-t{turn}", next(output_lens)
            if turn == 0:
                requests.append(WorkloadRequest(name, start, system_prompt + own, output_len))
            else:
                before = f"c{i}-t{turn - 1}"
                requests.append(WorkloadRequest(name, pause, own, output_len, after=before, carries_history=True))
    return requests


def _tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    tokens: list[int] = rng.integers(vocab_size, size=count).tolist()
    return tokens


def _streams(seed: int, count: int) -> list[np.random.Generator]:
    """One generator a thing, so that changing one distribution leaves the other draws as they were."""
    return [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(count)]


def _at_least(*limits: tuple[str, int, int]) -> None:
    for name, value, low in limits:
        if value < low:
            raise ConfigError(f"workload: {name} must be at least {low}, got {value}")
