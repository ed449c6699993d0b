"""The interface of KV memory to the scheduler.

It leaves open when memory is taken: paging on demand is one policy behind it, reservation at admission another.
`PagedKVCacheManager` describes the methods; here are the defaults of memory without sharing, caching and rounding.
"""

from __future__ import annotations

from typing import Protocol

from chairlift.core.kv.index_changes import IndexChangeLog
from chairlift.core.kv.paged_kv_cache import FULL, MemoryDemand, TableChange
from chairlift.request import Request


class KVCacheManager(Protocol):
    """Owns the block tables of the requests. Every method computes its need first, and on failure nothing changes."""

    num_blocks: int
    block_size: int
    windows: tuple[int | None, ...] = FULL
    index_changes: IndexChangeLog | None = None

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_evictable_blocks(self) -> int:
        return 0

    @property
    def num_rounding_blocks(self) -> int:
        """Blocks that are neither free nor in a table: lost to the allocator's rounding."""
        return 0

    @property
    def num_shared_blocks(self) -> int:
        return 0

    @property
    def version(self) -> int:
        """Changes whenever an allocation that failed might succeed now."""
        ...

    def check_fits(self, request: Request) -> None:
        """Raise RequestError, with the arithmetic, if the request could not run even alone."""
        return

    def demand(self, request: Request) -> MemoryDemand: ...

    def allocate(self, request: Request) -> int | None:
        """Give a request its block tables; returns the number of tokens that already have K and V, None on failure."""
        ...

    def grow(self, request: Request, num_slots: int) -> TableChange | None: ...

    def commit(self, request: Request) -> None:
        """Allow other requests to share the full blocks of a chunk."""
        return

    def begin_step(self) -> list[tuple[Request, list[int]]]:
        """Release the blocks that left the window of their layers by the last step, and return them by request."""
        return []

    def free(self, request: Request) -> None: ...

    def forget(self, request: Request) -> None:
        """Drop all that is kept for a request that has finished."""
        return

    def block_tables(self, request: Request) -> list[list[int]]: ...

    def worst_case_blocks(self, request: Request) -> int: ...

    def num_held_slots(self, request: Request) -> int:
        return request.num_slots

    def num_released_slots(self, request: Request) -> int:
        return 0
