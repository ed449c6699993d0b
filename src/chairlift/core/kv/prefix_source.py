"""PrefixSource: where the K and V of a request's first tokens come from, if they were computed before.

LeaderPrefixes          the siblings of the request; there is no cache
PrefixCache             blocks of the pool, found by their hashes
StoredPrefixes          blocks of the pool, and a store outside of it
CheckpointedPrefixes    blocks of the pool or a store, as far as there is a checkpoint of the recurrent state
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from chairlift.core.kv.block_tables import BlockTables
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request


class PrefixSource(Protocol):
    """Finds blocks for requests that are admitted, and keeps blocks of others.

    Attributes:
        num_checkpoints: checkpoints of recurrent states in use; num_evicted_checkpoints: those evicted so far.
    """

    num_checkpoints: int = 0
    num_evicted_checkpoints: int = 0

    @property
    def version(self) -> int:
        """Changes whenever a longer prefix might be found, in addition to the version of the pool."""
        return 0

    def find(self, request: Request, limit: int) -> list[list[int]]:
        """For each group of layers the blocks that the request can share, at most `limit`; equally many."""
        ...

    def expect(self, request: Request) -> None:
        """Keep what a waiting request can share, as long as the blocks of others can be evicted."""
        return

    def attach(self, tables: BlockTables) -> None:
        """Register the tables of an admitted request. A source may write blocks, and then increases `num_committed`."""
        return

    def commit(self, tables: BlockTables) -> None:
        """Allow other requests to share the blocks that have become full and computed."""
        ...

    def detach(self, tables: BlockTables) -> None:
        """Commit the tables of a request for the last time, before its blocks are released."""
        self.commit(tables)

    def num_swappable_tokens(self, tables: BlockTables) -> int | None:
        """The number of tokens after which a request can continue, if their K and V are kept in the swap space; None
        if it has to start again."""
        return tables.request.num_computed_tokens

    def record_swap(self, tables: BlockTables) -> None:
        """Record that K and V of so many tokens are copied to the swap space; `detach` follows."""
        return

    def forget(self, request: Request) -> None:
        """Drop what is known of the tokens of a request, which has finished, or continues another one."""
        return

    def begin_step(self) -> None:
        """Index what the last steps have written."""
        return

    def plan_step(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Add the checkpoints that the scheduled requests write in this step to its output."""
        return

    def plan_draft_checkpoints(self, output: SchedulerOutput, requests: Sequence[Request]) -> None:
        """Add the checkpoints that requests write after draft tokens, which are released if a token is rejected."""
        return

    def checkpoint(self, request: Request) -> int | None:
        """The checkpoint with the recurrent state of the request at its admission; None if there is none."""
        return None

    def num_matched_tokens(self, request: Request) -> int:
        """The number of tokens of which other requests had K and V at the admission of the request."""
        return request.num_computed_tokens


def num_full_blocks(tables: BlockTables, block_size: int) -> int:
    """The number of blocks that are full of computed tokens, whose values are known."""
    request = tables.request
    return min(request.num_computed_tokens, len(request.token_ids)) // block_size
