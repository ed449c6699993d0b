"""The block tables of a request: the blocks that have, or will have, K and V of its tokens.

a request with 14 tokens, of which 10 are computed, in blocks of 4 slots:

[ 0  1  2  3][ 4  5  6  7][ 8  9  .  .][ .  .  .  .]     slots with K and V, and slots to be written
|------ committed ------|     full and computed: other requests may share them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from chairlift.request import Request

NO_BLOCK: Final = -1
"""The entry of a block table for tokens that no later query reads; only tables of sliding windows have such entries."""


@dataclass(slots=True)
class BlockTables:
    """A table for each group of layers (see `KVGroups`); most models have one group.

    Attributes:
        num_committed: the number of blocks, the first ones of each table, that are full and computed.
        num_released: for each table the number of its first entries that have no block any more.
    """

    request: Request
    block_ids: list[list[int]]
    num_committed: int
    num_released: list[int]


def held_blocks(tables: Sequence[Sequence[int]]) -> list[int]:
    """The blocks of all tables, without the entries that have none."""
    return [block_id for table in tables for block_id in table if block_id != NO_BLOCK]
