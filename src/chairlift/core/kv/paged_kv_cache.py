"""Paged KV memory: the block tables of the requests, extended on demand and shared as far as prefixes are equal.

Every method computes its need first, and on failure it returns with nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from chairlift.core.kv.block_copies import BlockCopies
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import NO_BLOCK, BlockTables, held_blocks
from chairlift.core.kv.kv_cache_manager import KVCacheManager, MemoryCounts, MemoryDemand, TableChange
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.core.kv.prefix_source import PrefixSource
from chairlift.core.kv.sliding_windows import SlidingWindows
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request


class PagedKVCacheManager(KVCacheManager):
    """Allocates blocks on demand (PagedAttention; Kwon et al., SOSP'23, section 4).

    Admission takes the blocks of all tokens, also of a prompt that is computed in chunks; decoding takes one more block
    at each block boundary. It is the one owner of block tables: the scheduler has requests, and the worker copies of
    the block ids.

    Args:
        prefixes: finds the blocks that a request shares, in most engines a `PrefixCache`.
    """

    def __init__(self, pool: BlockPool, groups: KVGroups, prefixes: PrefixSource, num_swap_blocks: int = 0) -> None:
        self.num_blocks, self.block_size, self.windows = pool.num_blocks, groups.block_size, groups.windows
        self.pool = pool
        self.prefixes = prefixes
        self.copies = BlockCopies(pool, prefixes, groups.block_size, num_swap_blocks)
        self.groups = groups
        self._windows = SlidingWindows(groups, pool) if groups.has_windows else None
        self._tables: dict[str, BlockTables] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def version(self) -> int:
        """Without a prefix cache it does not change when a leader fills blocks that a sibling could share."""
        return self.pool.version + self.prefixes.version

    def counts(self) -> MemoryCounts:
        checkpoints = self.prefixes.num_checkpoints, self.prefixes.num_evicted_checkpoints
        num_swapped = self.copies.swap_space.num_used
        return MemoryCounts(self.pool.num_evictable, self.pool.num_shared, 0, num_swapped, *checkpoints)

    def block_tables(self, request: Request) -> list[list[int]]:
        """The request's block table for each group of layers; read-only."""
        return self._tables[request.request_id].block_ids

    def worst_case_blocks(self, request: Request) -> int:
        """The maximum number of blocks that the request holds at a time before it finishes."""
        # K and V of the last token are never written.
        return sum(self.groups.most_blocks(request.max_total_tokens - 1))

    def demand(self, request: Request) -> MemoryDemand:
        """What the admission of the request would take now."""
        needed = self._num_needed(request, self._shared_prefix(request))
        return MemoryDemand(needed, self.pool.num_free, self.pool.num_evictable, self.pool.num_free)

    def num_cached_tokens(self, request: Request) -> int:
        return len(self._shared_prefix(request)[0]) * self.block_size

    def allocate(self, request: Request) -> int | None:
        """Give a request the blocks of all its tokens. Those of a prefix that another request has computed are shared.
        Groups of layers with a window take further blocks later, by `grow`.

        Returns the number of tokens that already have K and V; None if memory is short.
        """
        assert request.request_id not in self._tables
        block_ids = self._shared_prefix(request)
        if self._num_needed(request, block_ids) > self.pool.num_free:
            return None
        num_shared, num_blocks = len(block_ids[0]), self.groups.num_blocks(request.num_tokens)
        self.pool.share(held_blocks(block_ids))  # before the next lines, which might evict them
        for table, window in zip(block_ids, self.windows, strict=True):
            if window is None:
                table += self.pool.allocate(num_blocks - num_shared)
        num_released = self.groups.first_blocks(num_shared * self.block_size)
        tables = self._tables[request.request_id] = BlockTables(request, block_ids, num_shared, num_released)
        num_swapped = self.copies.swap_in(tables)
        self.prefixes.attach(tables)
        self._count_slots(tables)
        return max(tables.num_committed * self.block_size, num_swapped)

    def _num_needed(self, request: Request, prefix: list[list[int]]) -> int:
        """The free blocks that the request needs if it shares `prefix`, whose blocks may be free themselves."""
        num_new = self.groups.num_new_blocks(request.num_tokens, len(prefix[0]))
        return num_new + sum(map(self.pool.is_free, held_blocks(prefix)))

    def _shared_prefix(self, request: Request) -> list[list[int]]:
        """For each group the blocks to share with other requests. At least one token is left to compute, because its
        logits are needed. Nothing is shared if the logprobs of the prompt are requested."""
        if request.sampling_params.prompt_logprobs is not None:
            return [[] for _ in self.windows]
        return self.prefixes.find(request, (len(request.token_ids) - 1) // self.block_size)

    def grow(self, request: Request, num_slots: int, num_computed: int | None = None) -> TableChange | None:
        """Extend the request's tables to `num_slots` tokens; None if memory is short. Also commits blocks that earlier
        steps have filled, and releases blocks that left their windows, as if `num_computed` tokens were computed."""
        tables, num_free = self._tables[request.request_id], self.pool.num_free
        num_blocks = self.groups.num_blocks(num_slots)
        counts = [max(0, num_blocks - len(block_ids)) for block_ids in tables.block_ids]
        num_computed = request.num_computed_tokens if num_computed is None else num_computed
        if self._windows is not None:
            num_free += self._windows.num_releasable(tables, num_computed)
        if sum(counts) > num_free:
            return None
        self.prefixes.commit(tables)
        released = [] if self._windows is None else self._windows.release(tables, num_computed)
        added = [self.pool.allocate(count) for count in counts]
        for block_ids, new in zip(tables.block_ids, added, strict=True):
            block_ids += new
        self._count_slots(tables)
        return TableChange(added, released)

    def commit(self, request: Request) -> None:
        """Allow other requests to share the full blocks of a chunk that was just scheduled."""
        tables = self._tables[request.request_id]
        self.prefixes.commit(tables)
        if self._windows is not None:
            self._windows.record_chunk(request)

    def fork(self, request: Request, parent: Request) -> None:
        """Let a request continue the sequence of another one; see `BlockCopies.fork`."""
        none = BlockTables(request, [[] for _ in self.windows], 0, [0] * len(self.windows))
        tables = self._tables.setdefault(request.request_id, none)
        self.copies.fork(tables, self._tables[parent.request_id])
        self._count_slots(tables)

    def release_outside(self, request: Request) -> TableChange:
        tables, windows = self._tables[request.request_id], self._windows
        self.prefixes.commit(tables)
        return TableChange([], [] if windows is None else windows.release(tables, request.num_computed_tokens))

    def _count_slots(self, tables: BlockTables) -> None:
        tables.request.num_slots = min(map(len, tables.block_ids)) * self.block_size

    def swap_out(self, request: Request) -> bool:
        return self.copies.swap_out(self._tables[request.request_id])

    def free(self, request: Request) -> None:
        """Release the request's blocks. Full ones stay in the prefix cache until they are evicted, and the ends of the
        tables are evicted first, because no prefix is found without its beginning."""
        tables = self._tables.pop(request.request_id)
        # A beam that has finished has the tokens of its answer, and its last block may have others.
        if not (request.sampling_params.use_beam_search and request.finish_reason is not None):
            self.prefixes.detach(tables)
        if self._windows is not None:
            self._windows.forget(request)
        rows = zip_longest(*tables.block_ids, fillvalue=NO_BLOCK)
        self.pool.release(reversed(held_blocks(list(rows))))
        request.num_slots = 0

    def forget(self, request: Request) -> None:
        self.prefixes.forget(request)
        self.copies.swap_space.forget(request.request_id)

    def begin_step(self, now: float = 0.0) -> list[tuple[Request, TableChange]]:
        self.pool.order.now = now
        self.prefixes.begin_step()
        chunked = [] if self._windows is None else self._windows.take_chunked()
        return [(request, self.release_outside(request)) for request in chunked]

    def plan_step(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        self.prefixes.plan_step(output, requests)
        self.copies.plan_step(output)

    def num_held_slots(self, request: Request) -> int:
        tables = self._tables.get(request.request_id)
        num_slots = 0 if tables is None else sum(map(len, tables.block_ids)) * self.block_size
        return num_slots - self.num_released_slots(request)

    def num_released_slots(self, request: Request) -> int:
        tables = self._tables.get(request.request_id)
        return 0 if tables is None else sum(tables.num_released) * self.block_size
