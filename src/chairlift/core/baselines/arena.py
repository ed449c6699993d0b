"""Arenas: allocators of consecutive blocks, as serving systems used them before paging (Kwon et al., SOSP'23, section
6.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple


class BlockRange(NamedTuple):
    """The blocks `start` to `start + size - 1`."""

    start: int
    size: int


class Arena(ABC):
    """Allocates pieces of consecutive blocks.

    Attributes:
        num_free: number of blocks that are in no piece.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_free = num_blocks

    @property
    def largest_piece(self) -> int:
        """Size of the largest piece that an empty arena can allocate."""
        return self.num_blocks

    @property
    @abstractmethod
    def largest_free(self) -> int:
        """Size of the largest piece that can be allocated now."""

    def rounded_size(self, count: int) -> int:
        """Size of the piece that an allocation of `count` blocks takes."""
        return count

    @abstractmethod
    def allocate(self, count: int) -> BlockRange | None:
        """Allocate a piece of `rounded_size(count)` blocks; None, with nothing changed, if there is no such piece."""

    @abstractmethod
    def release(self, piece: BlockRange) -> None:
        """Free an allocated piece."""


def power_of_two_above(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class BuddyArena(Arena):
    """The buddy allocator (Knowlton, 1965): the size of a piece is a power of two. Pieces are split in halves, and are
    merged with their buddy when both are free.

    An arena whose size is not a power of two is a row of trees of decreasing size:

        983 blocks = |------ 512 ------|--- 256 ---|- 128 -|64|16|4|2|1|

    Each tree starts at a multiple of its size, so the buddy of a piece starts at `start ^ size`. No merge crosses
    trees, because the next tree is smaller.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._free: dict[int, list[int]] = {1 << order: [] for order in range(num_blocks.bit_length())}
        start = 0
        for size in reversed(self._free):
            if num_blocks & size:
                self._free[size].append(start)
                start += size

    @property
    def largest_piece(self) -> int:
        return max(self._free)

    @property
    def largest_free(self) -> int:
        return max((size for size, starts in self._free.items() if starts), default=0)

    def rounded_size(self, count: int) -> int:
        return power_of_two_above(count)

    def allocate(self, count: int) -> BlockRange | None:
        wanted = self.rounded_size(count)
        size = next((size for size, starts in self._free.items() if size >= wanted and starts), None)
        if size is None:
            return None
        start = self._free[size].pop(0)
        while size > wanted:
            size //= 2
            insort(self._free[size], start + size)
        self.num_free -= wanted
        return BlockRange(start, wanted)

    def release(self, piece: BlockRange) -> None:
        start, size = piece
        self.num_free += size
        while self._take_free(size, start ^ size):
            start &= ~size
            size *= 2
        insort(self._free[size], start)

    def _take_free(self, size: int, start: int) -> bool:
        """Remove this piece from the free list; False if it is not free as a whole."""
        starts = self._free.get(size, [])
        index = bisect_left(starts, start)
        if index == len(starts) or starts[index] != start or 2 * size not in self._free:
            return False
        del starts[index]
        return True


class FirstFitArena(Arena):
    """First fit: an allocation takes exactly `count` blocks from the lowest gap that is large enough."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._gaps = [BlockRange(0, num_blocks)]

    @property
    def largest_free(self) -> int:
        return max((gap.size for gap in self._gaps), default=0)

    def allocate(self, count: int) -> BlockRange | None:
        index = next((i for i, gap in enumerate(self._gaps) if gap.size >= count), None)
        if index is None:
            return None
        start, size = self._gaps[index]
        self._gaps[index : index + 1] = [BlockRange(start + count, size - count)] if size > count else []
        self.num_free -= count
        return BlockRange(start, count)

    def release(self, piece: BlockRange) -> None:
        self.num_free += piece.size
        index = bisect_left(self._gaps, piece)
        start, end = piece.start, piece.start + piece.size
        low = high = index
        if index > 0 and sum(self._gaps[index - 1]) == start:
            low, start = index - 1, self._gaps[index - 1].start
        if index < len(self._gaps) and self._gaps[index].start == end:
            high, end = index + 1, sum(self._gaps[index])
        self._gaps[low:high] = [BlockRange(start, end - start)]


ARENAS: dict[str, Callable[[int], Arena]] = {"buddy": BuddyArena, "first-fit": FirstFitArena}
