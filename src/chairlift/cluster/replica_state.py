"""ReplicaState: what a router knows about one replica: cached prefixes, queued tokens and free blocks.

A replica publishes the changes of its prefix cache and its load after each step. A router adds what it has sent itself,
so that its next decision does not wait for an update. Stale or lost updates make a decision worse, and never an answer
wrong, because the replica finds the blocks of a prompt itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from chairlift.core.kv.block_hashes import block_hash, root_hash
from chairlift.core.kv.index_changes import block_key


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """What a router needs of a prompt.

    Attributes:
        num_tokens: number of prompt tokens, of all siblings once.
        block_keys: the keys of its full blocks (see `core.kv.block_pool.block_key`), which depend on the cache salt and
            the LoRA adapter of the request, so that prefixes of different tenants differ.
    """

    num_tokens: int
    block_keys: tuple[int, ...] = ()

    @classmethod
    def from_tokens(
        cls, token_ids: Sequence[int], block_size: int, cache_salt: str | None = None, lora_id: int = 0
    ) -> RoutedPrompt:
        """The prompt with these tokens, in time proportional to their number."""
        keys, parent = [], root_hash(cache_salt, lora_id)
        for end in range(block_size, len(token_ids) + 1, block_size):
            parent = block_hash(parent, list(token_ids[end - block_size : end]))
            keys.append(block_key(parent))
        return cls(len(token_ids), tuple(keys))

    def num_cached_tokens(self, block_size: int, cached: Container[int]) -> int:
        """Number of leading tokens in a prefix cache with these blocks. The last token is computed in any case, because
        it gives the first output token."""
        return min(self.num_cached_blocks(cached) * block_size, self.num_tokens - 1)

    def num_cached_blocks(self, cached: Container[int]) -> int:
        """Number of leading blocks that are among these ones."""
        return len(list(takewhile(cached.__contains__, self.block_keys)))


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica.

    Attributes:
        queued_tokens: prompt tokens of requests without output.
        num_unfinished: number of unfinished requests.
        free_blocks: blocks of the KV pool without a reference, including cached ones.
    """

    queued_tokens: int = 0
    num_unfinished: int = 0
    free_blocks: int = 0


@dataclass(slots=True)
class _SentPrompt:
    """An unfinished request that this router has sent. `num_queued` is 0 after its first output."""

    prompt: RoutedPrompt
    num_queued: int


@dataclass(slots=True, eq=False)
class ReplicaState:
    """The state of a replica as one router knows it.

    Attributes:
        block_size, num_blocks: the KV pool of the replica.
        others: the load of the requests that other routers have sent; its `free_blocks` belong to the replica.
        is_engine_running: the engine of the replica is not being restarted.
        is_answering: the last call of this router to the replica was answered in time.
    """

    block_size: int
    num_blocks: int
    others: ReplicaLoad = field(init=False)
    is_engine_running: bool = True
    is_answering: bool = True
    _cached: set[int] = field(default_factory=set)
    _expected: Counter[int] = field(default_factory=Counter)
    _known: set[int] = field(default_factory=set)  # the union of both
    _ends: set[int] = field(default_factory=set)  # the last full blocks of the prompts that were sent
    _sent: dict[str, _SentPrompt] = field(default_factory=dict)
    _queued_tokens: int = 0

    def __post_init__(self) -> None:
        self.others = ReplicaLoad(free_blocks=self.num_blocks)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are queued ahead of a new request."""
        return self._queued_tokens + self.others.queued_tokens

    @property
    def num_unfinished(self) -> int:
        return len(self._sent) + self.others.num_unfinished

    def change_cache(self, stored: Iterable[int], removed: Iterable[int]) -> None:
        """Apply published changes of the prefix cache. Changes of unknown blocks have no effect."""
        self._cached.difference_update(removed)
        self._cached.update(stored)
        self._known.difference_update(key for key in removed if key not in self._expected)
        self._ends.difference_update(removed)
        self._known.update(stored)

    def has_block(self, key: int) -> bool:
        """Whether a block is cached, or will be when requests on the way are computed."""
        return key in self._known

    def has_session(self, prompt: RoutedPrompt) -> bool:
        """Whether a prompt begins with all full blocks of another one that this router has sent to the replica, and
        whose last block has not been evicted."""
        return not self._ends.isdisjoint(prompt.block_keys)

    def num_cached_blocks_of(self, prompt: RoutedPrompt) -> int:
        """Number of leading blocks of a prompt for which `has_block` is true."""
        return prompt.num_cached_blocks(self._known)

    def num_cached_tokens(self, prompt: RoutedPrompt) -> int:
        """Number of leading tokens of a prompt that are in these blocks."""
        return prompt.num_cached_tokens(self.block_size, self._known)

    def add(self, request_id: str, prompt: RoutedPrompt) -> None:
        """Record a request that is sent to the replica."""
        num_queued = prompt.num_tokens - self.num_cached_tokens(prompt)
        self._sent[request_id] = _SentPrompt(prompt, num_queued)
        self._queued_tokens += num_queued
        self._expected.update(prompt.block_keys)
        self._known.update(prompt.block_keys)
        self._ends.update(prompt.block_keys[-1:])
        if len(self._ends) > self.num_blocks:
            self._ends &= self._known  # Without prompts that were never cached, such as those of aborted requests.

    def record_output(self, request_id: str) -> None:
        """Record that the prompt of a request has been computed. Unknown ids and further calls have no effect."""
        if (sent := self._sent.get(request_id)) is not None:
            self._queued_tokens -= sent.num_queued
            sent.num_queued = 0

    def remove(self, request_id: str) -> None:
        """Record the end of a request. Unknown ids have no effect."""
        self.record_output(request_id)
        if (sent := self._sent.pop(request_id, None)) is not None:
            self._expected.subtract(sent.prompt.block_keys)
            ended = {key for key in sent.prompt.block_keys if self._expected[key] < 1}
            for key in ended:
                del self._expected[key]
            self._known -= ended - self._cached
