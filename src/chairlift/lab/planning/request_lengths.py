"""Lengths of the requests that a plan is made for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from chairlift.engine.startup.pool_capacity import (
    LENGTHS_PER_DRAW,
    KVPool,
    RequestLengths,
    forced_request,
    make_empty_manager,
    rejection_message,
)
from chairlift.lab.workload.lengths import LengthDistribution, paired_lengths


def draw_lengths(
    prompt: LengthDistribution,
    output: LengthDistribution,
    max_tokens: LengthDistribution | None,
    max_model_len: int,
    seed: int,
) -> Iterator[RequestLengths]:
    """Lengths without end, the same for the same arguments. Pairs longer than `max_model_len` are drawn again; what is
    asked for is at least the true output, and at most what `max_model_len` leaves; without `max_tokens` it is the true
    output.

    Raises:
        ConfigError: as `paired_lengths`.
    """
    pair_rng, limit_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(2))
    while True:
        pairs = paired_lengths(prompt, output, max_model_len, pair_rng, LENGTHS_PER_DRAW)
        limits = [0] * LENGTHS_PER_DRAW if max_tokens is None else max_tokens.sample(limit_rng, LENGTHS_PER_DRAW)
        for (num_prompt, num_output), limit in zip(pairs, limits, strict=True):
            yield RequestLengths(num_prompt, num_output, max(num_output, min(limit, max_model_len - num_prompt)))


def accepted(pool: KVPool, lengths: Iterable[RequestLengths]) -> Iterator[RequestLengths]:
    """The lengths that an engine with this pool does not reject."""
    manager = make_empty_manager(pool)
    return (length for length in lengths if rejection_message(forced_request(0, length), pool, manager) is None)
