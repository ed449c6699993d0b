"""Paged KV memory: blocks on demand, with a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryDemand
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.errors import RequestError
from chairlift.request import Request


@dataclass(slots=True)
class _BlockTable:
    """`block_ids[:num_committed]` are full and computed, so other requests may share them."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    num_committed: int = 0


class PagedKVCacheManager(KVCacheManager):
    """Allocates blocks on demand (PagedAttention; Kwon et al., SOSP'23, section 4).

    Admission takes the blocks of all tokens known by then; decoding takes one more block at each block boundary.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(self.pool, block_size) if enable_prefix_caching else None
        self._tables: dict[str, _BlockTable] = {}

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

    def worst_case_blocks(self, request: Request) -> int:
        # K and V of the last token are never written.
        return self._num_blocks_for(request.max_total_tokens - 1)

    def block_ids(self, request: Request) -> list[int]:
        return self._tables[request.request_id].block_ids

    def check_fits(self, request: Request) -> None:
        needed = self.worst_case_blocks(request)
        if needed > self.num_blocks:
            raise RequestError(
                f"request {request.request_id} can never fit: {request.num_prompt_tokens} prompt tokens and up to "
                f"{request.max_total_tokens - request.num_prompt_tokens} output tokens write "
                f"{request.max_total_tokens - 1} slots = {needed} blocks of {self.block_size}, and the whole pool has "
                f"{self.num_blocks}. Lower max_tokens, shorten the prompt, or raise --kv-cache-memory-bytes.",
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
        self.pool.share(prefix)
        new = self.pool.allocate(self._num_blocks_for(request.num_tokens) - len(prefix))
        table = _BlockTable(request, prefix + new, num_committed=len(prefix))
        self._tables[request.request_id] = table
        request.num_slots = len(table.block_ids) * self.block_size
        request.num_computed_tokens = len(prefix) * self.block_size
        return True

    def grow(self, request: Request, num_slots: int) -> list[int] | None:
        count = self._num_blocks_for(num_slots) - request.num_slots // self.block_size
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
        if self._prefix_cache is not None:
            self._prefix_cache.register(request, table.block_ids, table.num_committed, num_full)
        table.num_committed = num_full

    def free(self, request: Request) -> None:
        self.commit(request)
        table = self._tables.pop(request.request_id)
        self.pool.release(reversed(table.block_ids))
        request.num_slots = 0

    def forget(self, request: Request) -> None:
        if self._prefix_cache is not None:
            self._prefix_cache.forget(request)

    def _demand(self, request: Request, prefix: list[int]) -> MemoryDemand:
        num_free_in_prefix = sum(map(self.pool.is_free, prefix))
        needed = self._num_blocks_for(request.num_tokens) - len(prefix) + num_free_in_prefix
        return MemoryDemand(needed, self.pool.num_free, self.pool.num_evictable, self.pool.num_free)

    def _shared_prefix(self, request: Request) -> list[int]:
        """Blocks to share with other requests. At least one token is left to compute, because its logits are needed."""
        limit = (len(request.token_ids) - 1) // self.block_size
        if request.sampling_params.prompt_logprobs is not None:
            return []
        if self._prefix_cache is None:
            return self._leader_blocks(request, limit)
        return self._prefix_cache.find(request, limit)

    def _leader_blocks(self, request: Request, limit: int) -> list[int]:
        """Without a prefix cache, a sibling still shares the prompt's full blocks with its leader."""
        leader = self._tables.get(request.leader_id) if request.leader_id is not None else None
        prompt = request.token_ids[: request.num_prompt_tokens]
        if leader is None or leader.request.token_ids[: request.num_prompt_tokens] != prompt:
            return []
        if leader.request.cache_salt != request.cache_salt:
            return []
        return leader.block_ids[: min(limit, leader.num_committed, request.num_prompt_tokens // self.block_size)]
