"""Blocks: who holds how many references, which are free, and which of the free ones still hold a known prefix.

    allocate ----> held (references > 0) ----> release
       ^                 ^                        |
       |                 | share (prefix hit)     v
       +--- free, in eviction order: [ never hashed ... | cached: least recently used ... most recently used ]

A cached block stays findable by its hash until it is allocated again, which is its eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """Reference counts, the free list and the prefix index of `num_blocks` equal blocks.

    `version` changes when a block becomes free or findable.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.version = 0
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_evictable = 0
        self._num_shared = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, the evictable ones included."""
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        """Free blocks that are findable by hash."""
        return self._num_evictable

    @property
    def num_shared(self) -> int:
        """Blocks with several references."""
        return self._num_shared

    def references(self, block_id: int) -> int:
        return self._references[block_id]

    def is_free(self, block_id: int) -> bool:
        return self._references[block_id] == 0

    def find(self, block_hash: bytes) -> int | None:
        """The block with these contents, held or free; None if there is none."""
        return self._block_by_hash.get(block_hash)

    def hash_of(self, block_id: int) -> bytes | None:
        return self._hashes[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, evicting cached ones last. The caller has compared with `num_free`."""
        assert count <= len(self._free)
        block_ids = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            self._forget(block_id)
            self._references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each; a cached free block comes back to life."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                assert self._hashes[block_id] is not None
                del self._free[block_id]
                self._num_evictable -= 1
            elif self._references[block_id] == 1:
                self._num_shared += 1
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each. Those freed first are evicted first, so pass a table's tail first."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0
            if self._references[block_id] == 1:
                self._num_shared -= 1
            elif self._references[block_id] == 0:
                self.version += 1
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
                else:
                    self._num_evictable += 1

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a held, full block findable. If equal contents are findable already, the first one stays."""
        assert self._references[block_id] > 0
        if self._hashes[block_id] is None and block_hash not in self._block_by_hash:
            self.version += 1
            self._hashes[block_id] = block_hash
            self._block_by_hash[block_hash] = block_id

    def forget_cached(self) -> int:
        """Make every free block unfindable; returns how many were."""
        forgotten = [block_id for block_id in self._free if self._hashes[block_id] is not None]
        for block_id in forgotten:
            self._forget(block_id)
        return len(forgotten)

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_by_hash[block_hash]
            self._hashes[block_id] = None
            self._num_evictable -= 1

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        free = set(self._free)
        assert free == {b for b, count in enumerate(self._references) if count == 0}
        assert self._num_shared == sum(count > 1 for count in self._references)
        assert self._num_evictable == sum(self._hashes[b] is not None for b in free)
        assert self._block_by_hash == {h: b for b, h in enumerate(self._hashes) if h is not None}
