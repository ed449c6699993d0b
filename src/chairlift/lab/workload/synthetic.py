"""Synthetic workloads of random tokens, also with a shared prefix.

Lengths, arrival times and tokens are drawn from separate random streams of one seed, so changing one distribution
leaves all other draws as they were. ConfigError is raised for a number below its limit, and as by
`LengthDistribution.sample`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import LengthDistribution, paired_lengths
from chairlift.lab.workload.request import WorkloadRequest


def make_workload(
    seed: int,
    count: int,
    prompt: LengthDistribution,
    output: LengthDistribution,
    arrivals: ArrivalProcess,
    vocab_size: int,
    *,
    token_round: int = 0,
    prefix_len: int = 0,
    max_tokens: LengthDistribution | None = None,
    max_model_len: int | None = None,
) -> list[WorkloadRequest]:
    """Returns `count` independent requests in order of arrival.

    Args:
        vocab_size: prompt tokens are uniform over 0..vocab_size - 1.
        token_round: another round has other tokens with the same lengths and arrivals, so blocks that one round left
            in the prefix cache do not match the next.
        prefix_len: the number of tokens that all prompts begin with, in addition to their own.
        max_tokens: the declared limits, raised to the output length where they are smaller. None: the output length.
        max_model_len: a prompt and an output with more tokens together are drawn again (`paired_lengths`); both
            lengths then come from one stream.
    """
    minima = (("count", count, 1), ("vocab_size", vocab_size, 1), ("seed", seed, 0), ("prefix_len", prefix_len, 0))
    for name, value, low in minima:
        if value < low:
            raise ConfigError(f"workload: {name} must be at least {low}, got {value}")
    prompt_rng, output_rng, arrival_rng, limit_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(4))
    token_rng = np.random.default_rng([seed, 1 + token_round])
    if max_model_len is None:
        pairs = list(zip(prompt.sample(prompt_rng, count), output.sample(output_rng, count), strict=True))
    else:
        pairs = paired_lengths(prompt, output, max_model_len, prompt_rng, count)
    limits = [0] * count if max_tokens is None else max_tokens.sample(limit_rng, count)
    times = arrivals.times(arrival_rng, count)
    prefix = random_tokens(token_rng, prefix_len, vocab_size)
    return [
        WorkloadRequest(
            f"r{token_round}-{i}",
            times[i],
            prefix + random_tokens(token_rng, prompt_len, vocab_size),
            output_len,
            max_tokens=None if max_tokens is None else max(output_len, limits[i]),
        )
        for i, (prompt_len, output_len) in enumerate(pairs)
    ]


def synthetic_tokens(key: str, count: int, vocab_size: int = 256) -> bytes:
    """Returns `count` token ids below min(vocab_size, 256) that depend on `key` only.

    A longer result starts with the shorter one. Results for different keys differ from the first tokens on, so they
    share no block of a prefix cache. One byte for each token keeps the trace of a whole day in memory.
    """
    tokens = hashlib.shake_128(key.encode()).digest(count)
    return tokens if vocab_size >= 256 else tokens.translate(_remainders(vocab_size))


@lru_cache(maxsize=8)
def _remainders(vocab_size: int) -> bytes:
    return bytes(value % vocab_size for value in range(256))


def random_tokens(rng: np.random.Generator, count: int, vocab_size: int) -> list[int]:
    """Returns `count` token ids that are uniform over 0..vocab_size - 1."""
    tokens: list[int] = rng.integers(vocab_size, size=count).tolist()
    return tokens
