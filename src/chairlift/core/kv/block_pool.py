"""The block pool: reference counts, the free blocks in eviction order, and an index of cached blocks by hash.

    allocate ----> held (references > 0) ----> release
       ^                 ^                        |
       |                 | share (prefix hit)     v
       +--- free, in eviction order: [ not cached ... | cached, such as least recently used ... most recently used ]

A cached block can be found by its hash until it is allocated again, which evicts its contents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from chairlift.core.kv.eviction_order import EvictionOrder


class BlockPool:
    """Owns `num_blocks` blocks of equal size.

    Attributes:
        num_evictable: number of free blocks that can still be found by their hash.
        num_shared: number of blocks with several references.
        version: changes whenever a block becomes free or can be found by its hash.
        index_listeners: called with each hash that enters (True) or leaves (False) the index.
    """

    def __init__(self, num_blocks: int, order: type[EvictionOrder] = EvictionOrder) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_evictable = self.num_shared = self.version = 0
        self.index_listeners: list[Callable[[bytes, bool], None]] = []
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self.order = order(num_blocks)

    @property
    def num_free(self) -> int:
        """Number of blocks without references, including evictable ones."""
        return len(self.order)

    def is_free(self, block_id: int) -> bool:
        return self._references[block_id] == 0

    def count_unshared(self, block_ids: Iterable[int]) -> int:
        """The number of these blocks that would be free after one release."""
        return sum(self._references[block_id] == 1 for block_id in block_ids)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this hash, held or free; None if there is none."""
        return self._block_by_hash.get(block_hash)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, and evict cached ones last. The caller has checked `num_free`."""
        assert count <= len(self.order)
        block_ids = []
        for _ in range(count):
            block_id = self.order.take()
            self._evict(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block. A cached free block leaves the free list."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                assert self._hashes[block_id] is not None
                self.order.remove(block_id)
                self.num_evictable -= 1
            elif self._references[block_id] == 1:
                self.num_shared += 1
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove a reference from each block. Cached blocks are evicted in the order of their release, so pass the end
        of a table first; blocks that are not cached are reused before them."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0
            if self._references[block_id] == 1:
                self.num_shared -= 1
            elif self._references[block_id] == 0:
                self.version += 1
                self.order.add(block_id, self._hashes[block_id])
                self.num_evictable += self._hashes[block_id] is not None

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Index a held, full block by its hash. If another held block has the same hash, that one stays in the index; a
        free one leaves it, because it would be evicted earlier."""
        assert self._references[block_id] > 0
        if self._hashes[block_id] is not None:
            return
        known = self._block_by_hash.get(block_hash)
        if known is not None and self.is_free(known):
            self._hashes[known], self._hashes[block_id] = None, block_hash
            self._block_by_hash[block_hash] = block_id
            self.order.remove(known)
            self.order.add(known, None)
            self.num_evictable -= 1
        elif known is None:
            self.version += 1
            self._hashes[block_id] = block_hash
            self._block_by_hash[block_hash] = block_id
            for listener in self.index_listeners:
                listener(block_hash, True)

    def _evict(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block_id] = None
            self.num_evictable -= 1
            for listener in self.index_listeners:
                listener(block_hash, False)
