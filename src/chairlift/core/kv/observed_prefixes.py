"""ObservedPrefixes: a prefix cache whose eviction order learns from the requests when blocks will be used."""

from __future__ import annotations

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import BlockTables
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.prefix_misses import PrefixMisses
from chairlift.request import Request


class ObservedPrefixes(PrefixCache):
    """Tells the order of the pool and `misses` which requests wait for which blocks, and which have used them."""

    def __init__(self, pool: BlockPool, groups: KVGroups) -> None:
        super().__init__(pool, groups)
        self.misses = PrefixMisses(self, pool, groups)

    def find(self, request: Request, limit: int) -> list[list[int]]:
        self.misses.taker = request.request_id
        return super().find(request, limit)

    def commit(self, tables: BlockTables) -> None:
        self.misses.taker = tables.request.request_id
        super().commit(tables)

    def expect(self, request: Request) -> None:
        if request.sampling_params.prompt_logprobs is None:
            num_blocks = (len(request.token_ids) - 1) // self._block_size
            self._pool.order.expect(request, self.chain(request, num_blocks))

    def attach(self, tables: BlockTables) -> None:
        self._pool.order.stop_expecting(tables.request)
        self.misses.attach(tables)

    def detach(self, tables: BlockTables) -> None:
        self.commit(tables)
        if tables.request.finish_reason is not None:
            chain = self.chain(tables.request, tables.num_committed)
            self._pool.order.finish(tables.request, [each for each in chain if self._pool.find(each) is not None])

    def forget(self, request: Request) -> None:
        self._pool.order.forget(request)
        self.misses.finish(request)
        super().forget(request)
