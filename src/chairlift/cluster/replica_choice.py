"""The choice of a replica for a request: the one that reaches the first token after the least work.

    cost of a replica = queued prompt tokens + prompt tokens that are not cached + DECODE_TOKENS * unfinished requests
                        + prompt tokens for which it has no free blocks * SHORTAGE_FACTOR

The sum is an estimate of the time to the first token, in prompt tokens: a cached prefix is used unless its replica has
so much more work that another one computes the prefix sooner. Without a cached prefix anywhere, two replicas are drawn
at random, and the cheaper one is chosen ("power of two choices"; Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing", IEEE TPDS 2001), because routers with the same stale information would all choose the same replica.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final, TypeVar

from chairlift.cluster.replica_state import ReplicaState, RoutedPrompt

DECODE_TOKENS: Final = 4.0
"""The work of an unfinished request beside a new prompt: it takes part in each of the steps that compute the prompt."""

SHORTAGE_FACTOR: Final = 4.0
"""A prompt without free blocks waits until other requests finish, which takes longer than computing as many tokens."""

ReplicaId = TypeVar("ReplicaId")


def cost(replica: ReplicaState, prompt: RoutedPrompt, num_cached: int) -> float:
    """The work before the first token of a prompt, of which `num_cached` tokens are cached, in prompt tokens."""
    num_new = prompt.num_tokens - num_cached
    free_slots = replica.others.free_blocks * replica.block_size
    shortage = max(0, replica.queued_tokens + num_new - free_slots)
    work = replica.queued_tokens + num_new + DECODE_TOKENS * replica.num_unfinished
    return work + SHORTAGE_FACTOR * shortage


def choose_replica(
    replicas: Mapping[ReplicaId, ReplicaState], prompt: RoutedPrompt, random_source: random.Random
) -> ReplicaId:
    """Choose the replica for a prompt, in time proportional to the replicas and to the cached blocks of the prompt.

    Args:
        replicas: the candidates by id; at least one.
    """
    cached = {replica_id: state.num_cached_tokens(prompt) for replica_id, state in replicas.items()}
    candidates = list(replicas)
    if not any(cached.values()) and len(candidates) > 2:
        candidates = random_source.sample(candidates, 2)
    random_source.shuffle(candidates)  # among equal costs
    return min(candidates, key=lambda replica_id: cost(replicas[replica_id], prompt, cached[replica_id]))
