"""Paged KV memory with copies of blocks: between beams, and for preempted requests to a swap space and back.

a beam with 10 tokens in blocks of 4     [ 3 ][ 7 ][ 5 ]
its fork                                 [ 3 ][ 7 ][ 8 ]     shares the full blocks; 8 is a copy of 5 (copy-on-write)
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.kv.kv_cache_manager import MemoryCounts
from chairlift.core.kv.paged_kv_cache import BlockTable, PagedKVCacheManager
from chairlift.core.kv.swap_space import SwapSpace
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request


class CopyingKVCacheManager(PagedKVCacheManager):
    """Plans the copies of blocks that the executor makes before a step.

    Args:
        num_swap_blocks: number of blocks of the swap space; 0 if preempted requests are recomputed.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_swap_blocks: int = 0
    ) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.swap_space = SwapSpace(num_swap_blocks)
        self._copied: dict[int, int] = {}

    def counts(self) -> MemoryCounts:
        return super().counts()._replace(num_swap_blocks=self.swap_space.num_used)

    def allocate(self, request: Request) -> int | None:
        """As for other memory. What the prefix cache does not have is copied from the swap space, if it is there."""
        num_cached = super().allocate(request)
        if num_cached is None or request.request_id not in self.swap_space:
            return num_cached
        block_ids = self._tables[request.request_id].block_ids
        self.swap_space.swap_in(request.request_id, block_ids, num_cached // self.block_size)
        return max(num_cached, request.num_computed_tokens)

    def swap_out(self, request: Request) -> bool:
        """Copy the blocks with computed tokens of a request that is being preempted to the swap space; False if they
        do not fit, or if no token is left for the next step to compute. `free` follows."""
        if not self.swap_space.num_blocks or request.num_computed_tokens == request.num_tokens:
            return False
        block_ids = self._tables[request.request_id].block_ids[: self._num_blocks_for(request.num_computed_tokens)]
        # A block that the step would write by a copy is not written yet when it is swapped out.
        return self.swap_space.swap_out(request.request_id, [self._copied.get(each, each) for each in block_ids])

    def fork(self, request: Request, parent: Request) -> None:
        """Let a beam continue the sequence of another beam with as many tokens: it shares the full blocks, and gets a
        copy of the block that is not full, which both will write. A beam without a table takes the blocks of its known
        tokens, which must be free; otherwise it keeps its own ones."""
        source, count = self._tables[parent.request_id], parent.num_computed_tokens // self.block_size
        self.commit(parent)
        table = self._tables.get(request.request_id)
        self.pool.share(source.block_ids[:count])
        if table is None:
            own = self.pool.allocate(self._num_blocks_for(request.num_tokens) - count)
            table = self._tables[request.request_id] = BlockTable(request, [], 0)
        else:
            own = table.block_ids[count:]
            self.pool.release(reversed(table.block_ids[:count]))
            super().forget(request)
        table.block_ids, table.num_committed = source.block_ids[:count] + own, min(source.num_committed, count)
        request.num_slots = len(table.block_ids) * self.block_size
        if parent.num_computed_tokens % self.block_size:
            self._copied[table.block_ids[count]] = source.block_ids[count]

    def free(self, request: Request) -> None:
        """As for other memory. The last block of a beam is not committed, whose tokens may be those of its answer."""
        if not request.sampling_params.use_beam_search:
            super().free(request)
            return
        self.pool.release(reversed(self._tables.pop(request.request_id).block_ids))
        request.num_slots = 0

    def plan_step(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        output.copied_blocks.update(self._copied)
        self._copied.clear()
        self.swap_space.plan_copies(output)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self.swap_space.forget(request.request_id)
