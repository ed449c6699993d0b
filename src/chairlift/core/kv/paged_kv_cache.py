"""Paged KV memory: the block tables of the requests, extended on demand and shared through a prefix cache.

    block table of a request with 14 tokens, of which 10 are computed, in blocks of 4 slots:

    [ 0  1  2  3][ 4  5  6  7][ 8  9  .  .][ .  .  .  .]     slots with K and V, and slots to be written
    |------ committed ------|     full, computed and indexed by the prefix cache: other requests may share them

Every method computes its need first, and on failure it returns with nothing changed.
"""

from __future__ import annotations

from dataclasses import dataclass

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryCounts, MemoryDemand, TableChange
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.errors import RequestError
from chairlift.request import Request


@dataclass(slots=True)
class BlockTable:
    """The blocks of a request. Those at indices below `num_committed` are full and computed, so they can be shared."""

    request: Request
    block_ids: list[int]
    num_committed: int


class PagedKVCacheManager(KVCacheManager):
    """Allocates blocks on demand (PagedAttention; Kwon et al., SOSP'23, section 4).

    Admission takes the blocks of all tokens, also of a prompt that is computed in chunks; decoding takes one more block
    at each block boundary. It is the one owner of block tables: the scheduler has requests, and the worker copies of
    the block ids.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self.pool, block_size) if enable_prefix_caching else None
        self._tables: dict[str, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def version(self) -> int:
        """Changes whenever an allocation that failed might succeed now. Without a prefix cache it does not change when
        a leader fills blocks that a sibling could share."""
        return self.pool.version

    def counts(self) -> MemoryCounts:
        return MemoryCounts(self.pool.num_evictable, self.pool.num_shared)

    def block_tables(self, request: Request) -> list[list[int]]:
        """The request's block table for each group of layers; read-only."""
        return [self._tables[request.request_id].block_ids]

    def worst_case_blocks(self, request: Request) -> int:
        """The maximum number of blocks that the request holds at a time before it finishes."""
        # K and V of the last token are never written.
        return self._num_blocks_for(request.max_total_tokens - 1)

    def check_fits(self, request: Request) -> None:
        """Raise RequestError, with the arithmetic, if the request could not run even alone."""
        needed = self.worst_case_blocks(request)
        if needed > self.num_blocks:
            groups = f" in {len(self.windows)} groups of layers" if len(self.windows) > 1 else ""
            raise RequestError(
                f"the request can never fit: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} output tokens write "
                f"{request.max_total_tokens - 1} slots = {needed} blocks of {self.block_size}{groups}, and the whole "
                f"pool has {self.num_blocks}. Lower max_tokens, shorten the prompt, or raise --kv-cache-memory-bytes.",
                "max_tokens",
            )

    def demand(self, request: Request) -> MemoryDemand:
        """What the admission of the request would take now."""
        needed = self._num_needed(request, self._shared_prefix(request))
        return MemoryDemand(needed, self.pool.num_free, self.pool.num_evictable, self.pool.num_free)

    def num_cached_tokens(self, request: Request) -> int:
        return len(self._shared_prefix(request)) * self.block_size

    def allocate(self, request: Request) -> int | None:
        """Give a request the blocks of all its tokens. Those of a prefix that another request has computed are shared.

        Returns the number of tokens that already have K and V; None if memory is short.
        """
        assert request.request_id not in self._tables
        block_ids = self._shared_prefix(request)
        if self._num_needed(request, block_ids) > self.pool.num_free:
            return None
        num_found, num_blocks = len(block_ids), self._num_blocks_for(request.num_tokens)
        self.pool.share(block_ids)  # before the next line, which might evict them
        block_ids += self.pool.allocate(num_blocks - num_found)
        self._tables[request.request_id] = BlockTable(request, block_ids, num_committed=num_found)
        request.num_slots = num_blocks * self.block_size
        return num_found * self.block_size

    def grow(self, request: Request, num_slots: int) -> TableChange | None:
        """Extend the request's table to `num_slots` tokens; None if memory is short. Also commits blocks that earlier
        steps have filled."""
        table = self._tables[request.request_id]
        count = self._num_blocks_for(num_slots) - len(table.block_ids)
        if count > self.pool.num_free:
            return None
        self._commit(table)
        added = self.pool.allocate(count)
        table.block_ids += added
        request.num_slots += count * self.block_size
        return TableChange([added], [])

    def commit(self, request: Request) -> None:
        """Allow other requests to share the full blocks of a chunk that was just scheduled."""
        self._commit(self._tables[request.request_id])

    def free(self, request: Request) -> None:
        """Release the request's blocks. Full ones stay in the prefix cache until they are evicted, and the end of the
        table is evicted first, because no prefix is found without its beginning."""
        table = self._tables.pop(request.request_id)
        self._commit(table)
        self.pool.release(reversed(table.block_ids))
        request.num_slots = 0

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a request that has finished."""
        if self._prefix_cache is not None:
            self._prefix_cache.forget(request)

    def _commit(self, table: BlockTable) -> None:
        request, start = table.request, table.num_committed
        end = min(request.num_computed_tokens, len(request.token_ids)) // self.block_size  # without pending tokens
        if end > start:
            if self._prefix_cache is not None:
                self._prefix_cache.register(request, table.block_ids, start, end)
            table.num_committed = end

    def _num_needed(self, request: Request, prefix: list[int]) -> int:
        """The free blocks that the request needs if it shares `prefix`, whose blocks may be free themselves."""
        num_new = self._num_blocks_for(request.num_tokens) - len(prefix)
        return num_new + sum(map(self.pool.is_free, prefix))

    def _shared_prefix(self, request: Request) -> list[int]:
        """The blocks to share with other requests. At least one token is left to compute, because its logits are
        needed. Nothing is shared if the logprobs of the prompt are requested."""
        if request.sampling_params.prompt_logprobs is not None:
            return []
        limit = (len(request.token_ids) - 1) // self.block_size
        if self._prefix_cache is not None:
            return self._prefix_cache.find(request, limit)
        leader = self._leader_table(request)
        limit = min(limit, request.num_prompt_tokens // self.block_size)
        return [] if leader is None else leader.block_ids[: min(limit, leader.num_committed)]

    def _leader_table(self, request: Request) -> BlockTable | None:
        """The table of a sibling with the same prompt, whose blocks are shared even without a prefix cache."""
        table = self._tables.get(request.leader_id) if request.leader_id is not None else None
        if table is None or table.request.cache_salt != request.cache_salt or table.request.lora_id != request.lora_id:
            return None
        prompt = request.token_ids[: request.num_prompt_tokens]
        return table if table.request.token_ids[: request.num_prompt_tokens] == prompt else None

    def _num_blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)
