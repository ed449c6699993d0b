"""KVGroups: layers whose K and V are needed equally long share block tables.

    window = 6, blocks of 4 slots, 14 tokens computed: the next query reads tokens 9 to 14

    full    [ 0  1  2  3][ 4  5  6  7][ 8  9 10 11][12 13  .  .]
    window     released     released  [ 8  9 10 11][12 13  .  .]

A request has a block table for each group, and all tables take blocks from the same pool.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from chairlift.core.kv.block_hashes import group_key
from chairlift.core.kv.block_tables import NO_BLOCK

FULL: Final[tuple[int | None, ...]] = (None,)
"""The windows of a model whose layers all attend to all preceding tokens: one group of layers without a window."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The groups of layers of a model, by the number of tokens that their queries read.

    Attributes:
        windows: for each group the tokens that a query attends to, including its own; None for all preceding tokens.
        max_chunk: maximum number of tokens of one request in a step.
    """

    windows: tuple[int | None, ...]
    block_size: int
    max_chunk: int

    def __post_init__(self) -> None:
        assert self.has_windows or self.windows == FULL, "layers without a window are one group if there are no others"

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    def num_blocks(self, num_tokens: int) -> int:
        """The number of blocks of the tokens in one group without a window."""
        return -(-num_tokens // self.block_size)

    def first_blocks(self, num_tokens: int) -> list[int]:
        """For each group the index of the first block that queries at position `num_tokens` or later read."""
        firsts = (0 if window is None else max(0, num_tokens - window + 1) for window in self.windows)
        return [first // self.block_size for first in firsts]

    def most_blocks(self, num_tokens: int) -> list[int]:
        """For each group the maximum number of blocks that a request holds at a time until it has `num_tokens`."""
        total, chunk = self.num_blocks(num_tokens), self.max_chunk - 1
        # One block more, because the ends of a window and a chunk need not be borders of blocks.
        windows = (total if window is None else self.num_blocks(window + chunk) + 1 for window in self.windows)
        return [min(total, most) for most in windows]

    def num_new_blocks(self, num_tokens: int, num_shared: int) -> int:
        """The blocks that the admission of a request takes, and those that groups with a window may need until its last
        known token is computed, if it shares the first `num_shared` blocks of each group."""
        num_blocks = self.num_blocks(num_tokens)
        firsts, mosts = self.first_blocks(num_shared * self.block_size), self.most_blocks(num_tokens)
        return sum(min(num_blocks, first + most) - num_shared for first, most in zip(firsts, mosts, strict=True))

    def max_tokens(self, num_blocks: int, limit: int) -> int:
        """The maximum number of tokens of one request for which a pool of `num_blocks` has enough blocks.

        It is a multiple of `block_size` and, if there are windows, at most `limit` rounded up to one.
        """
        if not self.has_windows:
            return num_blocks * self.block_size
        counts = range(1, self.num_blocks(limit) + 1)
        fitting = bisect_right(counts, num_blocks, key=lambda count: sum(self.most_blocks(count * self.block_size)))
        return fitting * self.block_size

    def find_prefix(self, find: Callable[[bytes], int | None], chain: Sequence[bytes]) -> list[list[int]]:
        """The tables of the longest prefix of a hash chain of which `find` has the blocks that a request needs."""
        if not self.has_windows:
            return [list(takewhile(lambda block_id: block_id is not None, map(find, chain)))]  # type: ignore[arg-type]
        numbers = range(len(self.windows))
        return self.longest_hit([find(group_key(block, group)) for group in numbers] for block in chain)

    def longest_hit(self, columns: Iterable[Sequence[int | None]]) -> list[list[int]]:
        """Return the tables of the longest prefix that a request can share.

        A prefix needs all of its blocks in groups without a window, and in the others the blocks that the next query
        reads.

        Args:
            columns: for each block of a request's tokens the block to share in each group; None if there is none.
        """
        if not self.has_windows:
            prefix: list[int] = []
            for (block,) in columns:
                if block is None:
                    break
                prefix.append(block)
            return [prefix]
        length = 0
        found: list[Sequence[int | None]] = []
        starts = [0] * len(self.windows)  # of the run of blocks to share that ends here, in each group
        for column in columns:
            found.append(column)
            starts = [len(found) if block is None else start for start, block in zip(starts, column, strict=True)]
            if any(start and window is None for start, window in zip(starts, self.windows, strict=True)):
                break
            needed = self.first_blocks(len(found) * self.block_size)
            if all(start <= first for start, first in zip(starts, needed, strict=True)):
                length = len(found)
        return [
            [NO_BLOCK] * first + [block for column in found[first:length] if (block := column[group]) is not None]
            for group, first in enumerate(self.first_blocks(length * self.block_size))
        ]
