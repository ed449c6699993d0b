"""The interface of KV memory to the scheduler.

It leaves open when memory is taken: paging on demand is one policy behind it, reservation at admission another.
`PagedKVCacheManager` describes the methods; here are the defaults of memory without sharing, caching and rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from chairlift.core.kv.index_changes import IndexChangeLog
from chairlift.core.kv.kv_groups import FULL
from chairlift.core.kv.prefix_misses import PrefixMisses
from chairlift.core.kv.prefix_source import PrefixSource
from chairlift.core.kv.uncached_prefixes import NoPrefixes
from chairlift.errors import RequestError
from chairlift.outputs import PrefixMatch, SchedulerOutput
from chairlift.request import Request


class MemoryDemand(NamedTuple):
    """What the admission of a request would take, in blocks.

    Attributes:
        needed: blocks to take from the pool; in groups with a window also those that must be free for the rest of the
            prompt.
        free: free blocks, including the `evictable` ones.
        largest: the largest allocation that is possible now; less than `free` only where blocks must be consecutive.
    """

    needed: int
    free: int
    evictable: int
    largest: int


class MemoryCounts(NamedTuple):
    """What events report of KV memory, in addition to its free blocks.

    Attributes:
        num_evictable_blocks: free blocks with cached contents.
        num_shared_blocks: blocks that are in several tables.
        num_rounding_blocks: blocks that are neither free nor in a table: lost to the allocator's rounding.
        num_swap_blocks: blocks of the swap space that have K and V of preempted requests.
        num_checkpoints: checkpoints in use; num_evicted_checkpoints: those that were evicted so far.
    """

    num_evictable_blocks: int = 0
    num_shared_blocks: int = 0
    num_rounding_blocks: int = 0
    num_swap_blocks: int = 0
    num_checkpoints: int = 0
    num_evicted_checkpoints: int = 0


class TableChange(NamedTuple):
    """A change of a request's block tables.

    Attributes:
        added: the appended blocks, for each group of layers; without windows there is one group.
        released: blocks of all groups that left the window of their layers.
        is_fork: the tables are those of another request: `added` and `released` are all blocks after and before it.
    """

    added: list[list[int]]
    released: list[int]
    is_fork: bool = False


class KVCacheManager(Protocol):
    """Owns the block tables of the requests. Every method computes its need first, and on failure nothing changes.

    Attributes:
        windows: the sliding window of each group of layers (see `KVGroups`); a slot is the memory of one token in the
            layers of one group.
        prefixes: finds what requests share, and plans checkpoints of recurrent states.
        index_changes: the changes of the prefix cache; None if they are not recorded.
        misses: explains what the prefix cache did not find; None without one.
        can_preempt: a running request can be preempted; otherwise it keeps its memory until it finishes.
    """

    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...] = FULL
    prefixes: PrefixSource = NoPrefixes()
    index_changes: IndexChangeLog | None = None
    misses: PrefixMisses | None = None
    can_preempt: bool = True

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def is_empty(self) -> bool:
        """No request holds a block."""
        return self.num_free_blocks == self.num_blocks and not self.counts().num_swap_blocks

    def counts(self) -> MemoryCounts:
        return MemoryCounts()

    @property
    def version(self) -> int:
        """Changes whenever an allocation that failed might succeed now."""
        ...

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

    def demand(self, request: Request) -> MemoryDemand: ...

    def num_admission_blocks(self, request: Request) -> int:
        """The free blocks that a request needs, also if others are admitted before it. With windows this is the most
        that it ever holds, because what it needs depends on the prefix that is cached, which others may evict."""
        return self.worst_case_blocks(request) if self.windows != FULL else self.demand(request).needed

    def num_cached_tokens(self, request: Request) -> int:
        """The number of tokens of a waiting request that the prefix cache has now."""
        return 0

    def allocate(self, request: Request) -> int | None:
        """Give a request its block tables; returns the number of tokens that already have K and V, None on failure."""
        ...

    def match_prefix(self, request: Request) -> PrefixMatch | None:
        """What the prefix cache had of the prompt of an admitted request, and why not more; None without a cache."""
        return None if self.misses is None else self.misses.match(request, self.prefixes.num_matched_tokens(request))

    def grow(self, request: Request, num_slots: int) -> TableChange | None: ...

    def commit(self, request: Request) -> None:
        """Allow other requests to share the full blocks of a chunk."""
        return

    def begin_step(self, now: float = 0.0) -> list[tuple[Request, TableChange]]:
        """Release the blocks that left the window of their layers by the last step."""
        return []

    def release_outside(self, request: Request) -> TableChange:
        """Release the blocks that left the windows of a running request."""
        return TableChange([], [])

    def plan_step(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Add the checkpoints that the scheduled requests write in this step, and the blocks that are copied before it,
        to its output."""
        return

    def swap_out(self, request: Request) -> bool:
        """Keep the computed tokens of a request that is being preempted; False if they have to be recomputed."""
        return False

    def fork(self, request: Request, parent: Request) -> None:
        """Let a beam continue the sequence of another one (see `BlockCopies.fork`)."""
        raise RuntimeError(f"{type(self).__name__} has no beams")

    def free(self, request: Request) -> None: ...

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a request that has finished."""
        return

    def block_tables(self, request: Request) -> list[list[int]]: ...

    def worst_case_blocks(self, request: Request) -> int: ...

    def num_held_slots(self, request: Request) -> int:
        """The number of slots that the request holds, in all groups of layers."""
        return request.num_slots

    def num_released_slots(self, request: Request) -> int:
        """The number of slots of computed tokens that are not held because they left the windows of their layers."""
        return 0
