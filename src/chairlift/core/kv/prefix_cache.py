"""The prefix cache: finds blocks by a chain of hashes, one for each full block of a request.

    tokens   [ 5 8 2 9 ][ 4 4 7 1 ][ 3 6          blocks of 4 tokens; the last one is not full
    chain       h0 ---------> h1                  h1 = hash(h0, tokens of its block)

Equal hashes mean equal tokens from the start of the prompt on, with the same salt and adapter, so K and V are equal.
"""

from __future__ import annotations

from chairlift.core.kv.block_hashes import block_hash, group_key, root_hash
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import BlockTables
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.core.kv.prefix_source import PrefixSource, num_full_blocks
from chairlift.request import Request


class PrefixCache(PrefixSource):
    """Hash chains of the unfinished requests, over the index of a block pool.

    The index has a block for each group of layers, so a prefix is found only as far as every group has what it needs.
    """

    def __init__(self, pool: BlockPool, groups: KVGroups) -> None:
        self._pool = pool
        self._groups, self._block_size = groups, groups.block_size
        self._chains: dict[str, list[bytes]] = {}

    def find(self, request: Request, limit: int) -> list[list[int]]:
        return self._groups.find_prefix(self._pool.find, self.chain(request, limit))

    def commit(self, tables: BlockTables) -> None:
        end = num_full_blocks(tables, self._block_size)
        if end > tables.num_committed:
            self.register(tables, end)

    def register(self, tables: BlockTables, end: int) -> None:
        """Index the first `end` blocks of all tables, which are full, as far as they are not indexed or released."""
        chain = self.chain(tables.request, end)
        for group, block_ids in enumerate(tables.block_ids):
            for index in range(max(tables.num_committed, tables.num_released[group]), end):
                self._pool.register(block_ids[index], group_key(chain[index], group))
        tables.num_committed = end

    def chain(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of the first `num_blocks` blocks of the request's tokens, which must be full; read-only."""
        chain = self._chains.setdefault(request.request_id, [])
        size = self._block_size
        for index in range(len(chain), num_blocks):
            parent = chain[-1] if chain else root_hash(request.cache_salt, request.lora_id)
            chain.append(block_hash(parent, request.token_ids[index * size : (index + 1) * size]))
        return chain if len(chain) == num_blocks else chain[:num_blocks]

    def forget(self, request: Request) -> None:
        """Drop the request's hash chain. Its blocks stay in the index."""
        self._chains.pop(request.request_id, None)
