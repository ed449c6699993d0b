"""BlockStore: blocks of the prefix cache that are kept outside of the pool, such as on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BlockStore(Protocol):
    """Keeps the contents of full blocks by their hashes (see `prefix_cache.block_hash`).

    It reads and writes the memory of the blocks itself. It is called while no step is computed.
    """

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Keep the contents of these blocks. It may keep none, and takes little time."""

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int) -> int:
        """Write contents into blocks; returns the number of blocks, the first ones, that were written.

        The contents are those that were saved with this hash, or nothing is written. Blocks that take longer to load
        than to compute are not loaded.

        Args:
            start: the position of the first token of the first block.
        """
