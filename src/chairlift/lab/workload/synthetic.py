"""Synthetic workloads: random tokens, drawn lengths and arrivals, everything decided by one seed."""

from __future__ import annotations

import numpy as np

from chairlift.errors import ConfigError
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import LengthDistribution, paired_lengths
from chairlift.lab.workload.request import WorkloadRequest

__all__ = ["WorkloadRequest", "make_workload"]


def make_workload(
    seed: int,
    count: int,
    prompt: LengthDistribution,
    output: LengthDistribution,
    arrivals: ArrivalProcess,
    vocab_size: int,
    *,
    token_round: int = 0,
    max_tokens: LengthDistribution | None = None,
    max_model_len: int | None = None,
) -> list[WorkloadRequest]:
    """`count` requests in order of arrival; the same arguments give the same requests.

    Prompt lengths, output lengths, arrivals and tokens come from streams of their own, so changing one distribution
    leaves the other draws as they were.

    Args:
        vocab_size: prompt tokens are uniform over 0..vocab_size - 1.
        token_round: draws other tokens for the same lengths and arrivals, so that a prefix cache warmed by one round
            gives nothing to the next.
        max_tokens: what users ask for at most; raised to the output length where it is less. None: the output length.
        max_model_len: pairs of a prompt and an output with more tokens are drawn again (`paired_lengths`); both
            lengths then come from one stream.

    Raises:
        ConfigError: count or vocab_size is less than 1, seed less than 0, or as LengthDistribution.sample.
    """
    for name, value, low in (("count", count, 1), ("vocab_size", vocab_size, 1), ("seed", seed, 0)):
        if value < low:
            raise ConfigError(f"workload: {name} must be at least {low}, got {value}")
    assert token_round >= 0
    prompt_rng, output_rng, arrival_rng, limit_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(4))
    token_rng = np.random.default_rng([seed, 1 + token_round])
    if max_model_len is None:
        pairs = list(zip(prompt.sample(prompt_rng, count), output.sample(output_rng, count), strict=True))
    else:
        pairs = paired_lengths(prompt, output, max_model_len, prompt_rng, count)
    limits = [0] * count if max_tokens is None else max_tokens.sample(limit_rng, count)
    times = arrivals.times(arrival_rng, count)
    return [
        WorkloadRequest(
            f"r{token_round}-{i}",
            times[i],
            token_rng.integers(vocab_size, size=prompt_len).tolist(),
            output_len,
            max_tokens=None if max_tokens is None else max(output_len, limits[i]),
        )
        for i, (prompt_len, output_len) in enumerate(pairs)
    ]
