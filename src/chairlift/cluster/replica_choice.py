"""The choice of a replica for a request: the one that reaches the first token after the least work.

    cost of a replica = load + prompt tokens that are not cached
    load              = queued prompt tokens + DECODE_TOKENS * unfinished requests
                        + prompt tokens for which it has no free blocks * SHORTAGE_FACTOR

The sum is an estimate of the time to the first token, in prompt tokens: a cached prefix is used unless its replica has
so much more work that another one computes the prefix sooner.

A session, whose earlier prompts were sent to one of the candidates, moves only if the loads differ by more than
MOVE_FACTOR times the cached tokens that it would lose: they are computed again, evict the prefixes of other sessions
there, and its next turns would leave them behind again for any small difference.

The cheapest one of at most four candidates is chosen: two random replicas of those with the longest cached prefix, and
two random others ("power of two choices"; Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE
TPDS 2001). Routers that took the cheapest replica of all would choose the same one, as long as their information is
equally stale. If all replicas have a prefix of the same length, such as a system prompt or nothing, two are candidates.
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

MOVE_FACTOR: Final = 4.0
"""The weight of prompt tokens that are not cached, for the next turn of a session."""

ReplicaId = TypeVar("ReplicaId")


def cost(replica: ReplicaState, prompt: RoutedPrompt, num_cached: int, move_factor: float = 1.0) -> float:
    """The work before the first token of a prompt, of which `num_cached` tokens are cached, in prompt tokens."""
    num_new = prompt.num_tokens - num_cached
    free_slots = replica.others.free_blocks * replica.block_size
    shortage = max(0, replica.queued_tokens + num_new - free_slots)
    load = replica.queued_tokens + DECODE_TOKENS * replica.num_unfinished + SHORTAGE_FACTOR * shortage
    return load + move_factor * num_new


def choose_replica(
    replicas: Mapping[ReplicaId, ReplicaState], prompt: RoutedPrompt, random_source: random.Random
) -> ReplicaId:
    """Choose the replica for a prompt, in time proportional to the replicas and to the cached blocks of the prompt.

    Args:
        replicas: all replicas by id; at least one.
    """
    longest, others = _split_by_prefix(replicas, prompt)
    candidates = _sample_two(longest, random_source) + _sample_two(others, random_source)
    factor = MOVE_FACTOR if any(replicas[name].has_session(prompt) for name in candidates) else 1.0

    def cost_of(name: ReplicaId) -> float:
        return cost(replicas[name], prompt, replicas[name].num_cached_tokens(prompt), factor)

    return min(candidates, key=cost_of)


def _split_by_prefix(
    replicas: Mapping[ReplicaId, ReplicaState], prompt: RoutedPrompt
) -> tuple[list[ReplicaId], list[ReplicaId]]:
    """The replicas with the longest cached prefix of a prompt, and the others.

    A block is cached with all blocks before it, because a pool evicts the end of a prefix first. So two blocks decide
    whether a prefix can be longer than the longest one so far. Lost updates may break the rule, and then a candidate
    has a shorter prefix, which its cost considers.
    """
    keys, length = prompt.block_keys, 0
    longest: list[ReplicaId] = []
    others: list[ReplicaId] = []
    for replica_id, state in replicas.items():
        if length < len(keys) and state.has_block(keys[length]):
            count = state.num_cached_blocks_of(prompt)
            if count > length:
                others += longest
                longest, length = [replica_id], count
            else:
                others.append(replica_id)
        elif length and not state.has_block(keys[length - 1]):
            others.append(replica_id)
        else:
            longest.append(replica_id)
    return longest, others


def _sample_two(replica_ids: list[ReplicaId], random_source: random.Random) -> list[ReplicaId]:
    return random_source.sample(replica_ids, min(2, len(replica_ids)))
