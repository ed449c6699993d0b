"""KV memory as the scheduler sees it: allocate memory to a request, grow it, free it.

The interface leaves open when memory is taken: paging on demand is one policy behind it, reservation at admission
another. Every method computes its need first, and on failure it returns with nothing changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from chairlift.core.kv.block_pool import IndexChanges
from chairlift.core.kv.kv_groups import FULL
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


class TableChange(NamedTuple):
    """The change of a request's block tables by `grow`.

    Attributes:
        added: for each group of layers the blocks that were appended.
        released: blocks of all groups that no later query reads.
    """

    added: list[list[int]]
    released: list[int]


class KVCacheManager(ABC):
    """Owns all block tables. The scheduler holds request objects, the worker holds copies of the block ids.

    The methods that are not abstract describe memory without sharing, caching and rounding.

    Attributes:
        windows: the window of each group of layers (see `KVGroups`). A slot is the memory of one token in the layers of
            one group.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...] = FULL) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = windows

    @abstractmethod
    def check_fits(self, request: Request) -> None:
        """Raise RequestError, with the arithmetic, if the request could not run even alone."""

    @abstractmethod
    def demand(self, request: Request) -> MemoryDemand:
        """What the admission of the request would take now."""

    @abstractmethod
    def allocate(self, request: Request) -> bool:
        """Give a request its block tables, and set `num_computed_tokens` to what they already hold.

        In groups with a window the blocks that are not shared are taken later, by `grow`.
        """

    @abstractmethod
    def grow(self, request: Request, num_slots: int) -> TableChange | None:
        """Release the blocks that no later query reads, and extend the tables to `num_slots` tokens; None if memory is
        short."""

    def take_index_changes(self) -> IndexChanges | None:
        """The changes of the prefix cache since the last call; None if there are none, or they are not recorded."""
        return None

    def release(self, request: Request) -> list[int]:
        """Release the blocks that no later query reads, and return them."""
        return []

    def hold(self, request: Request, num_tokens: int) -> bool:
        """Allocate what a request holds when it has `num_tokens` tokens; False if memory is short.

        It serves to count the requests that a pool holds.
        """
        return self.allocate(request) and (
            request.num_slots >= num_tokens or self.grow(request, num_tokens) is not None
        )

    def commit(self, request: Request) -> None:  # noqa: B027
        """Allow other requests to share the full blocks below `num_computed_tokens`."""

    @abstractmethod
    def free(self, request: Request) -> None:
        """Release the request's blocks. The caller resets its progress."""

    def forget(self, request: Request) -> None:  # noqa: B027
        """Drop all that is kept for a request that has finished."""

    @abstractmethod
    def block_tables(self, request: Request) -> list[list[int]]:
        """The request's block table for each group of layers; read-only."""

    @abstractmethod
    def worst_case_blocks(self, request: Request) -> int:
        """The maximum number of blocks that the request holds at a time before it finishes."""

    def num_written_slots(self, request: Request) -> int:
        """The number of slots with K and V that the request holds, in all groups."""
        return request.num_computed_tokens

    @property
    @abstractmethod
    def num_free_blocks(self) -> int: ...

    @property
    @abstractmethod
    def version(self) -> int:
        """Changes whenever an allocation that failed might succeed now."""

    @property
    def num_evictable_blocks(self) -> int:
        return 0

    @property
    def num_rounding_blocks(self) -> int:
        """Blocks that are neither free nor in a table: lost to the allocator's rounding."""
        return 0

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that are in several tables."""
        return 0

    def _num_blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)
