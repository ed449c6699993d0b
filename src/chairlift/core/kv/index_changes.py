"""IndexChangeLog: which blocks entered and left the index of a prefix cache, for routers and events."""

from __future__ import annotations

HASH_BYTES = 32
KEY_BYTES = 8


def block_key(block_hash: bytes) -> int:
    """The first bytes of a hash as a positive integer. It is enough to estimate which prefixes a pool has, and must
    never decide which blocks a request reads."""
    return int.from_bytes(block_hash[:KEY_BYTES]) >> 1


class IndexChangeLog:
    """Records the changes of an index; `record` is one of the `BlockPool.index_listeners` of its pool."""

    def __init__(self) -> None:
        self._changes: dict[int, bool] = {}

    def record(self, block_hash: bytes, is_stored: bool) -> None:
        """Record a change of the first group of layers, whose keys are hashes without a suffix."""
        if len(block_hash) == HASH_BYTES:
            self._changes[block_key(block_hash)] = is_stored

    def take(self) -> tuple[list[int], list[int]] | None:
        """The keys of the blocks that entered and of those that left the index since the last call; None if there are
        none. A key is in one of the lists, by its last change."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return stored, [key for key, is_stored in changes.items() if not is_stored]
