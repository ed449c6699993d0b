"""StoredPrefixes: a prefix cache that is extended by a store outside of the pool, such as a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Protocol

from chairlift.core.kv.block_hashes import group_key
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import NO_BLOCK, BlockTables, held_blocks
from chairlift.core.kv.kv_groups import KVGroups
from chairlift.core.kv.prefix_cache import PrefixCache
from chairlift.core.kv.prefix_source import PrefixSource
from chairlift.request import Request


class BlockStore(Protocol):
    """Keeps the contents of full blocks by their keys (see `block_hashes.group_key`), or of checkpoints by the
    hashes of the blocks before them.

    It reads and writes their memory itself. It is called while no step is computed.
    """

    def save(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Keep the contents of these blocks. It may keep none, and takes little time."""

    def num_stored(self, hashes: Sequence[bytes]) -> int:
        """The number of blocks, the first ones, that `load` may read at a time."""

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], start: int, num_tokens: int | None = None) -> int:
        """Write contents into blocks; returns the number of blocks, the first ones, that were written.

        The contents are those that were saved with this hash, or nothing is written. Blocks that take longer to load
        than to compute are not loaded.

        Args:
            start: the position of the first token that has to be computed if nothing is loaded.
            num_tokens: the number of such tokens; None for the tokens of the blocks.
        """


class StoredPrefixes(PrefixSource):
    """Saves the blocks of finished requests, and loads prefixes that the pool does not have.

    In a group with a window, a request saves the blocks that are in the window at its end. Therefore a later request
    can continue it there, and not before.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, groups: KVGroups, store: BlockStore) -> None:
        self._cache, self._pool, self._groups, self._store = cache, pool, groups, store

    def find(self, request: Request, limit: int) -> list[list[int]]:
        return self._cache.find(request, limit)

    def expect(self, request: Request) -> None:
        self._cache.expect(request)

    def attach(self, tables: BlockTables) -> None:
        """Load the longest stored prefix that continues the shared one. At least one token is left to compute."""
        self._cache.attach(tables)
        limit, start = (len(tables.request.token_ids) - 1) // self._groups.block_size, tables.num_committed
        if limit <= start or not is_stored(tables.request):
            return
        chain = self._cache.chain(tables.request, limit)
        if self._groups.has_windows:
            self._load_groups(tables, chain)
        else:
            count = self._store.load(chain[start:], tables.block_ids[0][start:limit], start * self._groups.block_size)
            self._cache.register(tables, start + count)

    def commit(self, tables: BlockTables) -> None:
        self._cache.commit(tables)

    def detach(self, tables: BlockTables) -> None:
        self._cache.detach(tables)
        if not is_stored(tables.request):
            return
        chain = self._cache.chain(tables.request, tables.num_committed)
        for group, (block_ids, start) in enumerate(zip(tables.block_ids, tables.num_released, strict=True)):
            keys = [group_key(block, group) for block in chain[start:]]
            self._store.save(keys, block_ids[start : len(chain)])

    def forget(self, request: Request) -> None:
        self._cache.forget(request)

    # -- groups with windows -------------------------------------------------------------------------------------

    def _load_groups(self, tables: BlockTables, chain: list[bytes]) -> None:
        """Load the longest stored prefix in all groups, or nothing."""
        start, size = tables.num_committed, self._groups.block_size
        end = len(self._groups.longest_hit(self._known_blocks(tables, chain))[0])
        firsts = self._groups.first_blocks(end * size)
        missing = [range(max(first, start), end) for first in firsts]
        if end <= start or self._num_needed(tables, end, missing) > self._pool.num_free:
            return
        has_window = [window is not None for window in self._groups.windows]
        loaded = [
            self._pool.allocate(len(each)) if is_new else block_ids[start:end]
            for each, is_new, block_ids in zip(missing, has_window, tables.block_ids, strict=True)
        ]
        keys = [group_key(chain[index], group) for group, each in enumerate(missing) for index in each]
        num_loaded = self._store.load(keys, held_blocks(loaded), start * size, (end - start) * size)
        if num_loaded < len(keys):
            for block_ids in compress(loaded, has_window):
                self._pool.release(block_ids)
            return
        for group, first in enumerate(firsts):
            if has_window[group]:
                block_ids = tables.block_ids[group]
                self._pool.release(reversed(block_ids[tables.num_released[group] : first]))
                tables.block_ids[group] = [NO_BLOCK] * first + block_ids[first:] + loaded[group]
                tables.num_released[group] = first
        self._cache.register(tables, end)

    def _known_blocks(self, tables: BlockTables, chain: list[bytes]) -> Iterator[list[int | None]]:
        """For each block of the tokens its block in each group, whatever its id is if it is stored; None if it is
        neither in the tables nor stored."""
        for index, block in enumerate(chain):
            held = [block_ids[index] for block_ids in tables.block_ids] if index < tables.num_committed else []
            yield [None if each == NO_BLOCK else each for each in held] or [
                0 if self._store.num_stored([group_key(block, group)]) else None
                for group in range(len(self._groups.windows))
            ]

    def _num_needed(self, tables: BlockTables, end: int, missing: list[range]) -> int:
        """The blocks of groups with windows for what is loaded, and for the chunk that is computed after it."""
        groups, num_tokens = self._groups, end * self._groups.block_size + self._groups.max_chunk
        num_chunk = groups.num_blocks(min(num_tokens, tables.request.num_tokens)) - end
        return sum(len(each) + num_chunk for each, window in zip(missing, groups.windows, strict=True) if window)


def is_stored(request: Request) -> bool:
    """Whether blocks of the request are kept. With a LoRA adapter they are not, because its id is another one after a
    restart. Logprobs of a prompt need all of its hidden states."""
    return not request.lora_id and request.sampling_params.prompt_logprobs is None
