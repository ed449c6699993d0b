"""Synthetic workloads: random tokens, drawn lengths and arrivals, everything decided by one seed."""

from __future__ import annotations

import numpy as np

from chairlift.errors import ConfigError
from chairlift.workload.arrivals import ArrivalProcess
from chairlift.workload.lengths import LengthDistribution
from chairlift.workload.request import WorkloadRequest

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
) -> list[WorkloadRequest]:
    """`count` requests in order of arrival; the same arguments give the same requests.

    Prompt lengths, output lengths, arrivals and tokens come from streams of their own, so changing one distribution
    leaves the other draws as they were.

    Args:
        vocab_size: prompt tokens are uniform over 0..vocab_size - 1.
        token_round: draws other tokens for the same lengths and arrivals, so that a prefix cache warmed by one round
            gives nothing to the next.

    Raises:
        ConfigError: count or vocab_size is less than 1, seed less than 0, or as LengthDistribution.sample.
    """
    for name, value, low in (("count", count, 1), ("vocab_size", vocab_size, 1), ("seed", seed, 0)):
        if value < low:
            raise ConfigError(f"workload: {name} must be at least {low}, got {value}")
    assert token_round >= 0
    prompt_rng, output_rng, arrival_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    token_rng = np.random.default_rng([seed, 1 + token_round])
    prompt_lens = prompt.sample(prompt_rng, count)
    output_lens = output.sample(output_rng, count)
    times = arrivals.times(arrival_rng, count)
    return [
        WorkloadRequest(
            f"r{token_round}-{i}", times[i], token_rng.integers(vocab_size, size=n).tolist(), output_lens[i]
        )
        for i, n in enumerate(prompt_lens)
    ]
