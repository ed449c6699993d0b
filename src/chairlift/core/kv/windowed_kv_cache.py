"""Paged KV memory for layers with sliding windows: one block table for each group of layers (see `KVGroups`).

Groups with a window take the blocks of each chunk when it is scheduled, and release those that left the window first.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand, TableChange
from chairlift.core.kv.paged_kv_cache import BlockTable, PagedKVCacheManager
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.windowed_groups import NO_BLOCK, KVGroups, held_blocks
from chairlift.request import Request


def group_hash(block: bytes, group: int) -> bytes:
    """The key of a block of one group in the index of the pool, which has blocks of all groups."""
    return block if group == 0 else block + group.to_bytes(2)


class WindowedPrefixCache(PrefixCache):
    """A prefix cache whose index has a block of each group for the same tokens."""

    def __init__(self, pool: BlockPool, groups: KVGroups) -> None:
        super().__init__(pool, groups.block_size)
        self._groups = groups

    def find_tables(self, request: Request, limit: int) -> list[list[int]]:
        """For each group the cached blocks of the longest prefix that can be shared, at most `limit` blocks."""
        return self._groups.longest_hit(map(self._find_in_groups, self.chain(request, limit)))

    def _find_in_groups(self, block: bytes) -> list[int | None]:
        return [self._pool.find(group_hash(block, group)) for group in range(len(self._groups.windows))]

    def register(self, request: Request, block_ids: list[list[int]], start: int, end: int) -> None:  # type: ignore[override]
        """Index the blocks `start` to `end - 1` of all tables that have not been released."""
        chain = self.chain(request, end)
        for group, table in enumerate(block_ids):
            for index in range(start, end):
                if (block_id := table[index]) != NO_BLOCK:
                    self._pool.register(block_id, group_hash(chain[index], group))


@dataclass(slots=True)
class WindowedTables(BlockTable):
    """The block table of a request for each group; the first `num_released` entries of each table have no block."""

    block_ids: list[list[int]]  # type: ignore[assignment]
    num_released: list[int]


class WindowedKVCacheManager(PagedKVCacheManager):
    """Allocates the blocks of all groups of layers from one pool.

    Args:
        windows, max_chunk: see `KVGroups`.
    """

    _tables: dict[str, WindowedTables]  # type: ignore[assignment]  # every method that reads tables is overridden
    _prefix_cache: WindowedPrefixCache | None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        windows: tuple[int | None, ...],
        max_chunk: int,
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.windows = windows
        self.groups = KVGroups(windows, block_size, max_chunk)
        self._prefix_cache = WindowedPrefixCache(self.pool, self.groups) if enable_prefix_caching else None
        self._chunked: dict[str, Request] = {}

    def block_tables(self, request: Request) -> list[list[int]]:
        return self._tables[request.request_id].block_ids

    def num_held_slots(self, request: Request) -> int:
        tables = self._tables.get(request.request_id)
        num_slots = 0 if tables is None else sum(map(len, tables.block_ids)) * self.block_size
        return num_slots - self.num_released_slots(request)

    def num_released_slots(self, request: Request) -> int:
        tables = self._tables.get(request.request_id)
        return 0 if tables is None else sum(tables.num_released) * self.block_size

    def worst_case_blocks(self, request: Request) -> int:
        return sum(self.groups.most_blocks(request.max_total_tokens - 1))

    def demand(self, request: Request) -> MemoryDemand:
        needed = self._num_needed_blocks(request, self._shared_tables(request))
        return MemoryDemand(needed, self.pool.num_free, self.pool.num_evictable, self.pool.num_free)

    def num_cached_tokens(self, request: Request) -> int:
        return len(self._shared_tables(request)[0]) * self.block_size

    def allocate(self, request: Request) -> int | None:
        """As for one group. Blocks of groups with a window that are not shared are taken later, by `grow`."""
        assert request.request_id not in self._tables
        block_ids = self._shared_tables(request)
        if self._num_needed_blocks(request, block_ids) > self.pool.num_free:
            return None
        self.pool.share(held_blocks(block_ids))
        num_shared, num_blocks = len(block_ids[0]), self._num_blocks_for(request.num_tokens)
        for table, window in zip(block_ids, self.windows, strict=True):
            if window is None:
                table += self.pool.allocate(num_blocks - num_shared)
        num_computed = num_shared * self.block_size
        tables = WindowedTables(request, block_ids, num_shared, self.groups.first_blocks(num_computed))
        self._tables[request.request_id] = tables
        self._count_slots(tables)
        return num_computed

    def grow(self, request: Request, num_slots: int) -> TableChange | None:
        tables = self._tables[request.request_id]
        return self._grow(tables, num_slots, request.num_computed_tokens)

    def grow_in_chunks(self, request: Request, num_tokens: int) -> bool:
        """Grow an admitted request to `num_tokens` tokens, without computing them; False if memory is short.

        It grows by the largest chunks of its prompt, then by single tokens. Meanwhile no other request computes a
        chunk, because chunks share the token budget of a step.
        """
        tables = self._tables[request.request_id]
        num_computed = request.num_computed_tokens
        while request.num_slots < num_tokens:
            num_computed = request.num_slots
            chunk = max(1, min(request.num_tokens - num_computed, self.groups.max_chunk))
            if self._grow(tables, num_computed + chunk, num_computed) is None:
                return False
        if num_computed < request.num_tokens:
            self._release(tables, request.num_tokens)
        return True

    def commit(self, request: Request) -> None:
        super().commit(request)
        self._chunked[request.request_id] = request

    def begin_step(self) -> list[tuple[Request, list[int]]]:
        chunked, self._chunked = self._chunked, {}
        running = [request for request in chunked.values() if request.finish_reason is None]
        released = [(r, self._release(self._tables[r.request_id], r.num_computed_tokens)) for r in running]
        return [(request, block_ids) for request, block_ids in released if block_ids]

    def free(self, request: Request) -> None:
        tables = self._tables.pop(request.request_id)
        self._chunked.pop(request.request_id, None)
        self._commit(tables)
        # The ends of all tables come first, because a prefix needs its blocks in every group.
        rows = zip_longest(*tables.block_ids, fillvalue=NO_BLOCK)
        self.pool.release(reversed(held_blocks(list(rows))))
        request.num_slots = 0

    def _grow(self, tables: WindowedTables, num_slots: int, num_computed: int) -> TableChange | None:
        """Release the blocks that no query after `num_computed` tokens reads, and extend the tables."""
        num_blocks = self._num_blocks_for(num_slots)
        counts = [max(0, num_blocks - len(block_ids)) for block_ids in tables.block_ids]
        outside = self._blocks_outside(tables, num_computed)
        if sum(counts) > self.pool.num_free + self.pool.count_unshared(outside):
            return None
        self._commit(tables)
        released = self._release(tables, num_computed)
        added = [self.pool.allocate(count) for count in counts]
        for block_ids, new in zip(tables.block_ids, added, strict=True):
            block_ids += new
        self._count_slots(tables)
        return TableChange(added, released)

    def _release(self, tables: WindowedTables, num_computed: int) -> list[int]:
        """Release the blocks that no query after `num_computed` tokens reads, and return them."""
        released = self._blocks_outside(tables, num_computed)
        if released:
            self._commit(tables)
            self.pool.release(released)
            first_blocks = self.groups.first_blocks(num_computed)
            for block_ids, start, end in zip(tables.block_ids, tables.num_released, first_blocks, strict=True):
                block_ids[start:end] = [NO_BLOCK] * (end - start)
            tables.num_released = first_blocks
            self._count_slots(tables)
        return released

    def _blocks_outside(self, tables: WindowedTables, num_computed: int) -> list[int]:
        """The blocks that no query after `num_computed` tokens reads, the last ones of each group first."""
        ranges = zip(tables.block_ids, tables.num_released, self.groups.first_blocks(num_computed), strict=True)
        return [block_id for block_ids, start, end in ranges for block_id in reversed(block_ids[start:end])]

    def _count_slots(self, tables: WindowedTables) -> None:
        tables.request.num_slots = min(map(len, tables.block_ids)) * self.block_size

    def _num_needed_blocks(self, request: Request, prefix: list[list[int]]) -> int:
        """The blocks that admission takes, and those that groups with a window may need until the last known token is
        computed."""
        num_shared, num_blocks = len(prefix[0]), self._num_blocks_for(request.num_tokens)
        first_blocks = self.groups.first_blocks(num_shared * self.block_size)
        most_blocks = self.groups.most_blocks(request.num_tokens)
        num_new = sum(
            min(num_blocks, first + most) - num_shared for first, most in zip(first_blocks, most_blocks, strict=True)
        )
        return num_new + sum(map(self.pool.is_free, held_blocks(prefix)))

    def _shared_tables(self, request: Request) -> list[list[int]]:
        """For each group the blocks to share with other requests, as `_shared_prefix`."""
        limit = (len(request.token_ids) - 1) // self.block_size
        if request.sampling_params.prompt_logprobs is not None:
            return [[] for _ in self.windows]
        if self._prefix_cache is not None:
            return self._prefix_cache.find_tables(request, limit)
        return self.groups.longest_hit(self._leader_columns(request, limit))

    def _leader_columns(self, request: Request, limit: int) -> list[list[int | None]]:
        leader = self._leader_table(request)
        if leader is None:
            return []
        tables = self._tables[leader.request.request_id]
        length = min(limit, tables.num_committed, request.num_prompt_tokens // self.block_size)
        return [
            [None if block_ids[index] == NO_BLOCK else block_ids[index] for block_ids in tables.block_ids]
            for index in range(length)
        ]


def hold(manager: KVCacheManager, request: Request, num_tokens: int) -> bool:
    """Allocate what a request holds when it has `num_tokens` tokens; False if memory is short."""
    if manager.allocate(request) is None:
        return False
    if isinstance(manager, WindowedKVCacheManager):
        return manager.grow_in_chunks(request, num_tokens)
    return request.num_slots >= num_tokens or manager.grow(request, num_tokens) is not None
