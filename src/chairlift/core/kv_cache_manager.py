"""KV memory as the scheduler sees it: can this request be admitted, can it grow, free it.

The interface says nothing of when memory is taken: blocks on demand is one policy behind it. Every method first
computes what it needs, compares, and on failure returns with nothing changed.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from chairlift.core.block_pool import BlockPool
from chairlift.errors import RequestError
from chairlift.request import Request


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """The arithmetic of an admission, in blocks. `free` includes the `evictable` ones; `largest` of them can be had in
    one piece, which matters to reservations only."""

    needed: int
    free: int
    evictable: int
    largest: int


class KVCacheManager(Protocol):
    """Owner of all block tables. The scheduler holds request objects, the worker holds copies of the ids.

    Attributes:
        grows: a request takes more memory after its admission.
    """

    block_size: int
    num_blocks: int
    grows: bool

    def check_fits(self, request: Request) -> None:
        """Raise RequestError, with the arithmetic, if the request could not even run alone."""
        ...

    def demand(self, request: Request) -> MemoryDemand:
        """What admitting the request would take now."""
        ...

    def admit(self, request: Request) -> bool:
        """Give a request without memory its table, and set its computed tokens to what was found there."""
        ...

    def grow(self, request: Request, num_slots: int) -> list[int] | None:
        """Extend the table to `num_slots` slots. The blocks appended, or None if they cannot be had."""
        ...

    def commit(self, request: Request) -> None:
        """The request's computed tokens are on their way into memory: full blocks may be shared from now on."""
        ...

    def free(self, request: Request) -> None:
        """Take the request's memory back; its progress is the caller's to reset."""
        ...

    def forget(self, request: Request) -> None:
        """The request will never come back."""
        ...

    def block_ids(self, request: Request) -> list[int]:
        """The block table, to read."""
        ...

    def worst_case_blocks(self, request: Request) -> int:
        """Blocks that the request takes from an empty pool at most, until it ends."""
        ...

    def num_duplicate_blocks(self, requests: Iterable[Request]) -> int:
        """How many more blocks these requests' tables name than there are."""
        ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_evictable_blocks(self) -> int: ...

    @property
    def num_rounding_blocks(self) -> int:
        """Blocks that are in no table and not free: lost to rounding."""
        ...

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that are in several tables."""
        ...

    @property
    def version(self) -> int:
        """Changes whenever a request that could not be admitted might be able to now."""
        ...


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash of a block's contents and of everything before it.

    SHA-256, because a collision would answer one user with another's prompt.
    """
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def hash_of_nothing(cache_salt: str | None) -> bytes:
    """What stands before a first block: requests with other salts hash the same tokens to other values, so nobody finds
    what they computed, nor can tell from the time it takes that they computed it."""
    return b"" if cache_salt is None else hashlib.sha256(b"cache salt\0" + cache_salt.encode()).digest()


@dataclass(slots=True)
class _Table:
    """`block_ids[:num_committed]` are full and computed, hence may be shared."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0


class PagedKVCacheManager:
    """Blocks on demand (PagedAttention; Kwon et al., SOSP'23, section 4) with a prefix cache.

    Admission takes the blocks of all tokens known by then; a decode takes one more at each block border.
    A chain of hashes, one a full block, finds the longest prefix that is still in the pool.
    """

    grows = True

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._tables: dict[str, _Table] = {}
        self._hashes: dict[str, list[bytes]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        return self.pool.num_evictable

    @property
    def num_rounding_blocks(self) -> int:
        return 0

    @property
    def num_shared_blocks(self) -> int:
        return self.pool.num_shared

    @property
    def version(self) -> int:
        return self.pool.version

    def worst_case_blocks(self, request: Request) -> int:
        return self._blocks_for(request.max_total_tokens - 1)

    def num_duplicate_blocks(self, requests: Iterable[Request]) -> int:
        tables = [self.block_ids(request) for request in requests]
        return sum(map(len, tables)) - len(set().union(*tables))

    def block_ids(self, request: Request) -> list[int]:
        return self._tables[request.request_id].block_ids

    def check_fits(self, request: Request) -> None:
        # The last token's K and V are never written.
        num_slots = request.max_total_tokens - 1
        needed = self._blocks_for(num_slots)
        if needed > self.num_blocks:
            raise RequestError(
                f"request {request.request_id} can never fit: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} output tokens write {num_slots} slots = "
                f"{needed} blocks of {self.block_size}, and the whole pool has {self.num_blocks}. Lower max_tokens, "
                f"shorten the prompt, or give the engine more --kv-cache-memory.",
                "max_tokens",
            )

    def demand(self, request: Request) -> MemoryDemand:
        return self._demand(request, self._find_prefix(request))

    def admit(self, request: Request) -> bool:
        assert request.request_id not in self._tables
        prefix = self._find_prefix(request)
        demand = self._demand(request, prefix)
        if demand.needed > demand.free:
            return False
        self.pool.share(prefix)
        new = self.pool.allocate(self._blocks_for(request.num_tokens) - len(prefix))
        table = _Table(request, prefix + new, num_committed=len(prefix))
        self._tables[request.request_id] = table
        request.num_slots = len(table.block_ids) * self.block_size
        request.num_computed_tokens = len(prefix) * self.block_size
        return True

    def grow(self, request: Request, num_slots: int) -> list[int] | None:
        count = self._blocks_for(num_slots) - request.num_slots // self.block_size
        if count > self.pool.num_free:
            return None
        self.commit(request)
        block_ids = self.pool.allocate(count)
        self._tables[request.request_id].block_ids += block_ids
        request.num_slots += count * self.block_size
        return block_ids

    def commit(self, request: Request) -> None:
        table = self._tables[request.request_id]
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if num_full <= table.num_committed:
            return
        if self.enable_prefix_caching:
            hashes = self._hash_chain(request, num_full)
            for index in range(table.num_committed, num_full):
                self.pool.register(table.block_ids[index], hashes[index])
        table.num_committed = num_full

    def free(self, request: Request) -> None:
        self.commit(request)
        table = self._tables.pop(request.request_id)
        self.pool.release(reversed(table.block_ids))
        request.num_slots = 0

    def forget(self, request: Request) -> None:
        self._hashes.pop(request.request_id, None)

    def _blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def _demand(self, request: Request, prefix: list[int]) -> MemoryDemand:
        revived = sum(map(self.pool.is_free, prefix))
        needed = self._blocks_for(request.num_tokens) - len(prefix) + revived
        return MemoryDemand(needed, self.pool.num_free, self.pool.num_evictable, self.pool.num_free)

    def _find_prefix(self, request: Request) -> list[int]:
        """The longest run of shareable blocks; at least one token is left to compute, for its logits."""
        limit = (len(request.token_ids) - 1) // self.block_size
        if request.sampling_params.prompt_logprobs is not None:
            return []
        if not self.enable_prefix_caching:
            return self._leader_blocks(request, limit)
        prefix: list[int] = []
        for block_hash in self._hash_chain(request, limit)[:limit]:
            block_id = self.pool.find(block_hash)
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix

    def _leader_blocks(self, request: Request, limit: int) -> list[int]:
        """Without a prefix cache a sibling still shares the prompt's full blocks with its leader."""
        leader = self._tables.get(request.leader_id) if request.leader_id is not None else None
        prompt = request.token_ids[: request.num_prompt_tokens]
        if leader is None or leader.request.token_ids[: request.num_prompt_tokens] != prompt:
            return []
        if leader.request.cache_salt != request.cache_salt:
            return []
        return leader.block_ids[: min(limit, leader.num_committed, request.num_prompt_tokens // self.block_size)]

    def _hash_chain(self, request: Request, num_blocks: int) -> list[bytes]:
        chain = self._hashes.setdefault(request.request_id, [])
        size = self.block_size
        for index in range(len(chain), num_blocks):
            parent = chain[-1] if chain else hash_of_nothing(request.cache_salt)
            chain.append(hash_block(parent, request.token_ids[index * size : (index + 1) * size]))
        return chain

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        self.pool.check()
        held: dict[int, int] = {}
        for table in self._tables.values():
            assert table.num_committed <= len(table.block_ids)
            for index, block_id in enumerate(table.block_ids):
                held[block_id] = held.get(block_id, 0) + 1
                assert index < table.num_committed or self.pool.references(block_id) == 1
        assert all(self.pool.references(b) == held.get(b, 0) for b in range(self.num_blocks))
