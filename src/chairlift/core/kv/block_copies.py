"""BlockCopies: copies of blocks that the executor makes before a step: for forks, and to a swap space and back.

a request with 10 tokens in blocks of 4     [ 3 ][ 7 ][ 5 ]
its fork                                    [ 3 ][ 7 ][ 8 ]     shares the full blocks; 8 is a copy of 5 (copy-on-write)
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import BlockTables, held_blocks
from chairlift.core.kv.prefix_source import PrefixSource
from chairlift.outputs import SchedulerOutput


class SwapSpace:
    """Blocks of host memory that keep K and V of preempted requests (Kwon et al., SOSP'23, section 4.5).

        preempted:  pool       [ 4 9 2 ] --swapped_out--> swap space [ 0 1 2 ]
        admitted:   swap space [ 0 1 2 ] --swapped_in---> pool       [ 7 3 8 ]     any free blocks

    It owns `num_blocks` blocks outside of the pool, and the tables of the requests that are in them. It only decides:
    the executor copies at the start of the next step, before the blocks of the pool are written.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._tables: dict[str, list[int]] = {}
        self._swapped_out: dict[int, int] = {}
        self._swapped_in: dict[int, int] = {}
        self._to_free: list[int] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tables

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def swap_out(self, request_id: str, block_ids: Sequence[int]) -> bool:
        """Plan to copy these blocks of the pool; False, with nothing changed, if the free blocks are too few."""
        assert request_id not in self._tables
        if len(block_ids) > len(self._free):
            return False
        table = self._tables[request_id] = [self._free.pop() for _ in block_ids]
        self._swapped_out.update(zip(table, block_ids, strict=True))
        return True

    def swap_in(self, request_id: str, block_ids: Sequence[int], num_cached: int) -> int:
        """Plan to copy the request's blocks to the first of these blocks of the pool; returns their number. They are
        free in the swap space once the step is planned, because it copies out before it copies in.

        Args:
            num_cached: the number of blocks, the first ones, that the pool has already.
        """
        table = self._tables.pop(request_id)
        self._swapped_in.update(list(zip(block_ids, table, strict=False))[num_cached:])
        self._to_free += table
        return len(table)

    def forget(self, request_id: str) -> None:
        """Free the request's blocks, if it has any."""
        self._free += reversed(self._tables.pop(request_id, []))

    def plan_copies(self, output: SchedulerOutput) -> None:
        """Add the copies since the last planned step to the output of a step."""
        output.swapped_out.update(self._swapped_out)
        output.swapped_in.update(self._swapped_in)
        self._swapped_out.clear()
        self._swapped_in.clear()
        self._free += reversed(self._to_free)
        self._to_free.clear()


class BlockCopies:
    """Plans the copies.

    Args:
        num_swap_blocks: number of blocks of the swap space; 0 if preempted requests are recomputed.
    """

    def __init__(self, pool: BlockPool, prefixes: PrefixSource, block_size: int, num_swap_blocks: int = 0) -> None:
        self._pool = pool
        self._prefixes = prefixes
        self._block_size = block_size
        self.swap_space = SwapSpace(num_swap_blocks)
        self._copied: dict[int, int] = {}

    def fork(self, tables: BlockTables, source: BlockTables) -> None:
        """Let a request continue the sequence of another one with as many tokens: it shares the full blocks, and gets a
        copy of the block that is not full, which both will write. It keeps its blocks behind them, and takes blocks for
        all of its known tokens, which must be free."""
        self._prefixes.commit(source)
        self._prefixes.forget(tables.request)
        count = source.request.num_computed_tokens // self._block_size
        num_blocks = max(count, -(-tables.request.num_tokens // self._block_size))
        for group, block_ids in enumerate(source.block_ids):
            shared, own = block_ids[:count], tables.block_ids[group]
            self._pool.share(held_blocks([shared]))
            self._pool.release(reversed(held_blocks([own[:count]])))
            own = own[count:]
            own += self._pool.allocate(max(0, num_blocks - count - len(own)))
            tables.block_ids[group] = shared + own
            if source.request.num_computed_tokens % self._block_size:
                self._copied[own[0]] = block_ids[count]
        tables.num_committed, tables.num_released = min(source.num_committed, count), list(source.num_released)

    def swap_out(self, tables: BlockTables) -> bool:
        """Copy the blocks with computed tokens of a request that is being preempted to the swap space; False if they
        do not fit, or if no token is left for the next step to compute. The release of the blocks follows."""
        request = tables.request
        if not self.swap_space.num_blocks or request.num_computed_tokens == request.num_tokens:
            return False
        if (num_tokens := self._prefixes.num_swappable_tokens(tables)) is None:
            return False
        block_ids = tables.block_ids[0][: -(-num_tokens // self._block_size)]
        # A block that the step would write by a copy is not written yet when it is swapped out.
        is_swapped = self.swap_space.swap_out(request.request_id, [self._copied.get(each, each) for each in block_ids])
        if is_swapped:
            self._prefixes.record_swap(tables)
        return is_swapped

    def swap_in(self, tables: BlockTables) -> int:
        """Copy what the tables of an admitted request lack from the swap space; returns the number of its first tokens
        that have K and V by that, 0 if it was not swapped."""
        request = tables.request
        if request.request_id not in self.swap_space:
            return 0
        num_blocks = self.swap_space.swap_in(request.request_id, tables.block_ids[0], tables.num_committed)
        return min(num_blocks * self._block_size, request.num_computed_tokens)

    def plan_step(self, output: SchedulerOutput) -> None:
        """Add the copies to the output of the next step."""
        output.copied_blocks.update(self._copied)
        self._copied.clear()
        self.swap_space.plan_copies(output)
