"""Checks that KV cache managers and block pools are consistent. Linear in the number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from chairlift.core.baselines.reservations import ReservationKVCacheManager
from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.core.kv.block_copies import SwapSpace
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.block_tables import NO_BLOCK
from chairlift.core.kv.checkpointed_prefixes import CheckpointedPrefixes
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.kv.state_checkpoints import StateCheckpoints


def make_paged_manager(
    num_blocks: int, block_size: int, enable_prefix_caching: bool = True, **fields: Any
) -> PagedKVCacheManager:
    """The manager of paged memory; `fields` are those of `KVPool`."""
    pool = KVPool(num_blocks, block_size, num_blocks * block_size, **fields)
    manager = make_kv_cache_manager(pool, enable_prefix_caching)
    assert isinstance(manager, PagedKVCacheManager)
    return manager


def check_pool(pool: BlockPool) -> None:
    """Free list, reference counts and hash index agree."""
    free = set(pool.order)
    assert free == {block for block, count in enumerate(pool._references) if count == 0}
    assert pool.num_shared == sum(count > 1 for count in pool._references)
    assert pool.num_evictable == sum(pool._hashes[block] is not None for block in free)
    assert pool._block_by_hash == {h: block for block, h in enumerate(pool._hashes) if h is not None}


def check_checkpoints(checkpoints: StateCheckpoints, reserved: Sequence[int]) -> None:
    """Each slot is free, reserved or in the index, and every indexed one can be evicted."""
    indexed = [checkpoint.slot for checkpoint in checkpoints._index.values()]
    assert sorted([*checkpoints._free, *reserved, *indexed]) == list(range(checkpoints.num_slots))
    assert checkpoints.num_used == len(reserved) + len(indexed)
    current = [checkpoint for _, entry, checkpoint in checkpoints._order if checkpoint.entry == entry]
    assert sorted(checkpoint.slot for checkpoint in current) == sorted(indexed)


def check_swap_space(swap_space: SwapSpace) -> None:
    """Each block is free or in one table."""
    held = [block_id for table in swap_space._tables.values() for block_id in table]
    assert sorted([*swap_space._free, *swap_space._to_free, *held]) == list(range(swap_space.num_blocks))
    assert swap_space.num_used == len(held) + len(swap_space._to_free)


def check_manager(manager: PagedKVCacheManager | ReservationKVCacheManager) -> None:
    """Block tables and allocated blocks agree."""
    if isinstance(manager, PagedKVCacheManager):
        _check_paged(manager)
    else:
        _check_reservations(manager)


def _check_paged(manager: PagedKVCacheManager) -> None:
    """References equal the tables that contain a block, only committed blocks are shared, and the entries without a
    block are those of released tokens."""
    pool = manager.pool
    check_pool(pool)
    check_swap_space(manager.copies.swap_space)
    assert manager.copies.swap_space._tables.keys().isdisjoint(manager._tables)
    held: dict[int, int] = {}
    for table in manager._tables.values():
        request, tables = table.request, manager.block_tables(table.request)
        lengths = [len(block_ids) for block_ids in tables]
        assert request.num_slots == min(lengths) * manager.block_size
        released = table.num_released
        assert manager.num_released_slots(request) == sum(released) * manager.block_size
        assert manager.num_held_slots(request) == (sum(lengths) - sum(released)) * manager.block_size
        for block_ids, num_released in zip(tables, released, strict=True):
            assert block_ids[:num_released] == [NO_BLOCK] * num_released
            for index, block_id in enumerate(block_ids[num_released:], start=num_released):
                held[block_id] = held.get(block_id, 0) + 1
                assert index < table.num_committed or pool._references[block_id] == 1
    if isinstance(prefixes := manager.prefixes, CheckpointedPrefixes):
        assert prefixes._states.keys() == manager._tables.keys()
        written = [slot for states in prefixes._states.values() for _, slot in states.written]
        check_checkpoints(prefixes.checkpoints, [*written, *(slot for _, slot in prefixes._swapped.values())])
        assert all(pool.find(key) is not None for key in prefixes.checkpoints._index), "a checkpoint without its block"
    assert pool._references == [held.get(block_id, 0) for block_id in range(manager.num_blocks)]


def _check_reservations(manager: ReservationKVCacheManager) -> None:
    """Pieces do not overlap, and every table is the start of its piece."""
    tables = manager._tables.values()
    pieces = sorted(table.piece for table in tables)
    assert all(a.start + a.size <= b.start for a, b in pairwise(pieces))
    assert manager.num_free_blocks == manager.num_blocks - sum(piece.size for piece in pieces)
    assert manager.counts().num_rounding_blocks == sum(table.piece.size - len(table.block_ids) for table in tables)
    for table in tables:
        start, size = table.piece
        assert table.block_ids == list(range(start, start + len(table.block_ids)))
        assert len(table.block_ids) <= size
