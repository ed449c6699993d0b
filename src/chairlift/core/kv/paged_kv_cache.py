"""Paged KV memory: blocks on demand, with a prefix cache; blocks that leave the window of their layers are released."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

from chairlift.core.kv.block_pool import BlockPool, IndexChanges
from chairlift.core.kv.block_store import BlockStore
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand, TableChange
from chairlift.core.kv.kv_groups import FULL, NO_BLOCK, KVGroups, held_blocks
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.errors import RequestError
from chairlift.request import Request


@dataclass(slots=True)
class _BlockTables:
    """The block table of a request for each group. Blocks at indices below `num_committed` are full and computed, so
    other requests may share them. The first `num_released` entries of each table have no block."""

    request: Request
    block_ids: list[list[int]]
    num_released: list[int]
    num_committed: int


class PagedKVCacheManager(KVCacheManager):
    """Allocates blocks on demand (PagedAttention; Kwon et al., SOSP'23, section 4).

    Admission takes the blocks of all tokens known by then; decoding takes one more block at each block boundary. Groups
    with a window take the blocks of each chunk when it is scheduled, and release those that left the window first.

    Args:
        windows, max_chunk: see `KVGroups`.
        block_store: keeps the blocks of finished requests, and is searched for prefixes that the pool does not have; or
            None. It needs a prefix cache and one group of layers without a window.
        record_index_changes: record the changes of the prefix cache for `take_index_changes`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        windows: tuple[int | None, ...] = FULL,
        max_chunk: int = 1,
        block_store: BlockStore | None = None,
        record_index_changes: bool = False,
    ) -> None:
        super().__init__(num_blocks, block_size, windows)
        self.block_store = block_store
        self.pool = BlockPool(num_blocks)
        if record_index_changes:
            self.pool.record_changes()
        self._groups = KVGroups(windows, block_size, max_chunk)
        self._has_windows = self._groups.has_windows
        self._prefix_cache = PrefixCache(self.pool, self._groups) if enable_prefix_caching else None
        self._tables: dict[str, _BlockTables] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        return self.pool.num_evictable

    @property
    def num_shared_blocks(self) -> int:
        return self.pool.num_shared

    @property
    def version(self) -> int:
        return self.pool.version

    def take_index_changes(self) -> IndexChanges | None:
        return self.pool.take_changes()

    def worst_case_blocks(self, request: Request) -> int:
        # K and V of the last token are never written.
        return sum(self._groups.most_blocks(request.max_total_tokens - 1))

    def num_written_slots(self, request: Request) -> int:
        return request.num_computed_tokens * len(self.windows) - request.num_released_slots

    def block_tables(self, request: Request) -> list[list[int]]:
        return self._tables[request.request_id].block_ids

    def check_fits(self, request: Request) -> None:
        needed = self.worst_case_blocks(request)
        if needed > self.num_blocks:
            groups = f" in {len(self.windows)} groups of layers" if len(self.windows) > 1 else ""
            raise RequestError(
                f"request {request.request_id} can never fit: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} output tokens write "
                f"{request.max_total_tokens - 1} slots = {needed} blocks of {self.block_size}{groups}, and the whole "
                f"pool has {self.num_blocks}. Lower max_tokens, shorten the prompt, or raise --kv-cache-memory-bytes.",
                "max_tokens",
            )

    def demand(self, request: Request) -> MemoryDemand:
        return self._demand(request, self._shared_prefix(request))

    def allocate(self, request: Request) -> bool:
        assert request.request_id not in self._tables
        prefix = self._shared_prefix(request)
        demand = self._demand(request, prefix)
        if demand.needed > demand.free:
            return False
        self.pool.share(held_blocks(prefix))
        num_shared, num_blocks = len(prefix[0]), self._num_blocks_for(request.num_tokens)
        for block_ids, window in zip(prefix, self.windows, strict=True):
            if window is None:
                block_ids += self.pool.allocate(num_blocks - num_shared)
        if self.block_store is not None:
            num_shared += self._load_blocks(request, prefix[0], num_shared, self.block_store)
        request.num_computed_tokens = num_shared * self.block_size
        table = _BlockTables(request, prefix, self._first_blocks(request), num_committed=num_shared)
        self._tables[request.request_id] = table
        self._count_slots(request, table)
        return True

    def grow(self, request: Request, num_slots: int) -> TableChange | None:
        table = self._tables[request.request_id]
        num_blocks = -(-num_slots // self.block_size)
        if self._has_windows:
            return self._grow_with_windows(request, table, num_blocks)
        count = num_blocks - request.num_slots // self.block_size
        if count > self.pool.num_free:
            return None
        self.commit(request)
        block_ids = self.pool.allocate(count)
        table.block_ids[0] += block_ids
        request.num_slots += count * self.block_size
        request.num_held_slots = request.num_slots
        return TableChange([block_ids], [])

    def _grow_with_windows(self, request: Request, table: _BlockTables, num_blocks: int) -> TableChange | None:
        counts = [max(0, num_blocks - len(block_ids)) for block_ids in table.block_ids]
        outside = self._blocks_outside(request)
        if sum(counts) > self.pool.num_free + self.pool.count_unshared(outside):
            return None
        self.commit(request)
        released = self.release(request)
        added = [self.pool.allocate(count) for count in counts]
        for block_ids, new in zip(table.block_ids, added, strict=True):
            block_ids += new
        self._count_slots(request, table)
        return TableChange(added, released)

    def release(self, request: Request) -> list[int]:
        released = self._blocks_outside(request)
        if released:
            self.commit(request)
            self.pool.release(released)
            table, first_blocks = self._tables[request.request_id], self._first_blocks(request)
            for block_ids, start, end in zip(table.block_ids, table.num_released, first_blocks, strict=True):
                block_ids[start:end] = [NO_BLOCK] * (end - start)
            table.num_released = first_blocks
            self._count_slots(request, table)
        return released

    def hold(self, request: Request, num_tokens: int) -> bool:
        """With windows, the request grows by the largest chunks of its prompt, then by single tokens.

        Meanwhile no other request computes a chunk, because chunks share the token budget of a step.
        """
        if not self._has_windows:
            return super().hold(request, num_tokens)
        if not self.allocate(request):
            return False
        while request.num_slots < num_tokens:
            request.num_computed_tokens = request.num_slots
            left = request.num_tokens - request.num_slots
            if self.grow(request, request.num_slots + max(1, min(left, self._groups.max_chunk))) is None:
                return False
        if request.num_computed_tokens < request.num_tokens:
            request.num_computed_tokens = request.num_tokens
            self.release(request)
        return True

    def commit(self, request: Request) -> None:
        table = self._tables[request.request_id]
        num_full = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size
        if num_full <= table.num_committed:
            return
        if self._prefix_cache is not None:
            self._prefix_cache.register(request, table.block_ids, table.num_committed, num_full)
        table.num_committed = num_full

    def free(self, request: Request) -> None:
        self.commit(request)
        table = self._tables.pop(request.request_id)
        if self.block_store is not None and self._is_stored(request) and self._prefix_cache is not None:
            hashes = self._prefix_cache.chain(request, table.num_committed)
            self.block_store.save(hashes, table.block_ids[0][: len(hashes)])
        # The ends of all tables come first, because a prefix needs its blocks in every group.
        rows = zip_longest(*table.block_ids, fillvalue=NO_BLOCK)
        self.pool.release(reversed(held_blocks(list(rows)) if self._has_windows else table.block_ids[0]))
        request.num_slots = request.num_held_slots = request.num_released_slots = 0

    def _load_blocks(self, request: Request, block_ids: list[int], num_shared: int, store: BlockStore) -> int:
        """Fill blocks of an admitted request from the store; returns their number. At least one token is left."""
        limit = (len(request.token_ids) - 1) // self.block_size
        cache = self._prefix_cache
        if cache is None or limit <= num_shared or not self._is_stored(request):
            return 0
        hashes = cache.chain(request, limit)[num_shared:]
        count = store.load(hashes, block_ids[num_shared:limit], num_shared * self.block_size)
        if count:
            cache.register(request, [block_ids], num_shared, num_shared + count)
        return count

    def _is_stored(self, request: Request) -> bool:
        """Whether blocks of the request are kept: those of LoRA adapters are not, because their ids are not the same
        after a restart. Logprobs of a prompt need all of its hidden states."""
        return not request.lora_id and request.sampling_params.prompt_logprobs is None

    def forget(self, request: Request) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.forget(request)

    def _count_slots(self, request: Request, table: _BlockTables) -> None:
        lengths = [len(block_ids) for block_ids in table.block_ids]
        request.num_slots = min(lengths) * self.block_size
        request.num_released_slots = sum(table.num_released) * self.block_size
        request.num_held_slots = sum(lengths) * self.block_size - request.num_released_slots

    def _blocks_outside(self, request: Request) -> list[int]:
        """The blocks that no later query reads, the last ones of each group first."""
        table = self._tables[request.request_id]
        ranges = zip(table.block_ids, table.num_released, self._first_blocks(request), strict=True)
        return [block_id for block_ids, start, end in ranges for block_id in reversed(block_ids[start:end])]

    def _first_blocks(self, request: Request) -> list[int]:
        return self._groups.first_blocks(request.num_computed_tokens)

    def _demand(self, request: Request, prefix: list[list[int]]) -> MemoryDemand:
        """The blocks that admission takes, and those that groups with a window may need until the last known token is
        computed."""
        num_shared, num_blocks = len(prefix[0]), self._num_blocks_for(request.num_tokens)
        first_blocks = self._groups.first_blocks(num_shared * self.block_size)
        most_blocks = self._groups.most_blocks(request.num_tokens)
        needed = sum(
            min(num_blocks, first + most) - num_shared for first, most in zip(first_blocks, most_blocks, strict=True)
        )
        needed += sum(map(self.pool.is_free, held_blocks(prefix)))
        return MemoryDemand(needed, self.pool.num_free, self.pool.num_evictable, self.pool.num_free)

    def _shared_prefix(self, request: Request) -> list[list[int]]:
        """For each group the blocks to share with other requests. At least one token is left to compute, because its
        logits are needed."""
        limit = (len(request.token_ids) - 1) // self.block_size
        if request.sampling_params.prompt_logprobs is not None:
            return [[] for _ in self.windows]
        if self._prefix_cache is None:
            return self._groups.longest_hit(self._leader_blocks(request, limit))
        return self._prefix_cache.find(request, limit)

    def _leader_blocks(self, request: Request, limit: int) -> list[list[int | None]]:
        """Without a prefix cache, a sibling still shares the prompt's full blocks with its leader."""
        leader = self._tables.get(request.leader_id) if request.leader_id is not None else None
        prompt = request.token_ids[: request.num_prompt_tokens]
        if leader is None or leader.request.token_ids[: request.num_prompt_tokens] != prompt:
            return []
        if leader.request.cache_salt != request.cache_salt:
            return []
        length = min(limit, leader.num_committed, request.num_prompt_tokens // self.block_size)
        return [
            [None if block_ids[index] == NO_BLOCK else block_ids[index] for block_ids in leader.block_ids]
            for index in range(length)
        ]
