"""SwapSpace: blocks of host memory that keep K and V of preempted requests (Kwon et al., SOSP'23, section 4.5).

    preempted:  pool       [ 4 9 2 ] --swapped_out--> swap space [ 0 1 2 ]
    admitted:   swap space [ 0 1 2 ] --swapped_in---> pool       [ 7 3 8 ]     any free blocks

It only decides. The executor copies at the start of the next step, before the blocks of the pool are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.outputs import SchedulerOutput


class SwapSpace:
    """Owns `num_blocks` blocks outside of the pool, and the tables of the requests that are in them."""

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
