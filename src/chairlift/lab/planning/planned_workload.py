"""The requests that a plan is made for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.engine.startup.pool_capacity import (
    LENGTHS_PER_DRAW,
    RequestLengths,
    forced_request,
    rejection_message,
)
from chairlift.lab.workload.lengths import LengthDistribution, paired_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """Lengths and arrivals of the requests of a plan.

    Attributes:
        input_len: distribution of the prompt lengths.
        output_len: distribution of the output lengths.
        max_tokens: distribution of the `max_tokens` of the requests; None takes their true output lengths.
        request_rate: Poisson arrivals per second in the simulation; None starts all requests at once.
        seed: seed of lengths and arrivals.
    """

    input_len: LengthDistribution
    output_len: LengthDistribution
    max_tokens: LengthDistribution | None = None
    request_rate: float | None = None
    seed: int = 0

    def lengths(self, max_model_len: int) -> Iterator[RequestLengths]:
        """Draw lengths endlessly; equal workloads draw equal lengths.

        Pairs longer than `max_model_len` are drawn again. `max_tokens` is at least the true output length, and at most
        what `max_model_len` leaves beside the prompt.

        Raises:
            ConfigError: too few pairs fit `max_model_len` (see `paired_lengths`).
        """
        pair_rng, limit_rng = map(np.random.default_rng, np.random.SeedSequence(self.seed).spawn(2))
        limits = [0] * LENGTHS_PER_DRAW
        while True:
            pairs = paired_lengths(self.input_len, self.output_len, max_model_len, pair_rng, LENGTHS_PER_DRAW)
            if self.max_tokens is not None:
                limits = self.max_tokens.sample(limit_rng, LENGTHS_PER_DRAW)
            for (num_prompt, num_output), limit in zip(pairs, limits, strict=True):
                yield RequestLengths(num_prompt, num_output, max(num_output, min(limit, max_model_len - num_prompt)))

    def to_dict(self) -> dict[str, Any]:
        """The workload for JSON."""
        lengths = ("input_len", "output_len", "max_tokens")
        texts = {name: None if (found := getattr(self, name)) is None else str(found) for name in lengths}
        return {**texts, "request_rate": self.request_rate, "seed": self.seed}


def accepted_lengths(pool: KVPool, load: PlannedWorkload) -> Iterator[RequestLengths]:
    """The endless lengths of the requests of a workload that an engine with this pool does not reject."""
    manager = make_kv_cache_manager(pool)
    lengths = load.lengths(pool.max_model_len)
    return (length for length in lengths if rejection_message(forced_request(0, length), pool, manager) is None)
