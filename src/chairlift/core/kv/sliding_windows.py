"""SlidingWindows: releases the blocks that no later query of a group of layers reads.

Groups with a window take the blocks of each chunk when it is scheduled, and release those that left the window first.
"""

from __future__ import annotations

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import NO_BLOCK, BlockTables
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.request import Request


class SlidingWindows:
    """The windows of a manager's groups. Released blocks must be committed before."""

    def __init__(self, groups: KVGroups, pool: BlockPool) -> None:
        self._groups = groups
        self._pool = pool
        self._chunked: dict[str, Request] = {}

    def num_releasable(self, tables: BlockTables, num_computed: int) -> int:
        """The number of blocks that `release` would make free."""
        return self._pool.count_unshared(self._blocks_outside(tables, num_computed))

    def release(self, tables: BlockTables, num_computed: int) -> list[int]:
        """Release the blocks that no query after `num_computed` tokens reads, and return them."""
        released = self._blocks_outside(tables, num_computed)
        if released:
            self._pool.release(released)
            first_blocks = self._groups.first_blocks(num_computed)
            for block_ids, start, end in zip(tables.block_ids, tables.num_released, first_blocks, strict=True):
                block_ids[start:end] = [NO_BLOCK] * (end - start)
            tables.num_released = first_blocks
        return released

    def record_chunk(self, request: Request) -> None:
        """Let the next `take_chunked` return a request, which computes a chunk in this step."""
        self._chunked[request.request_id] = request

    def take_chunked(self) -> list[Request]:
        """The requests that computed a chunk in the last step, and still run."""
        chunked, self._chunked = self._chunked, {}
        return [request for request in chunked.values() if request.finish_reason is None]

    def forget(self, request: Request) -> None:
        self._chunked.pop(request.request_id, None)

    def _blocks_outside(self, tables: BlockTables, num_computed: int) -> list[int]:
        """The blocks that no query after `num_computed` tokens reads, the last ones of each group first."""
        ranges = zip(tables.block_ids, tables.num_released, self._groups.first_blocks(num_computed), strict=True)
        return [block_id for block_ids, start, end in ranges for block_id in reversed(block_ids[start:end])]
