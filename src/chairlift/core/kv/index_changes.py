"""IndexChangeLog: which blocks entered and left the index of a prefix cache, for routers and events."""

from __future__ import annotations

from typing import NamedTuple

HASH_BYTES = 32
KEY_BYTES = 8


class IndexChanges(NamedTuple):
    """The blocks that entered and left the index of a pool, as the integers of `block_key`. A key is in one of the
    lists, by its last change."""

    stored: list[int]
    removed: list[int]


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

    def take(self) -> IndexChanges | None:
        """The changes since the last call, one for each key; None if there are none."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        stored = [key for key, is_stored in changes.items() if is_stored]
        return IndexChanges(stored, [key for key, is_stored in changes.items() if not is_stored])
