"""The recorded changes of the prefix cache: applied in order, they give the index of the pool."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.index_changes import IndexChangeLog, block_key
from support.fakes import allocate, make_request


def record_changes(pool: BlockPool) -> IndexChangeLog:
    log = IndexChangeLog()
    pool.index_listeners.append(log.record)
    return log


def hash_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "register", "release", "take"]), st.integers(0, 30))))
def test_the_changes_give_the_index(actions: list[tuple[str, int]]) -> None:
    pool, held, known = BlockPool(4), list[int](), set[int]()
    log = record_changes(pool)

    def take() -> None:
        if (changes := log.take()) is not None:
            stored, removed = changes
            assert stored or removed
            assert not set(stored) & set(removed)
            known.difference_update(removed)
            known.update(stored)

    for action, number in actions:
        if action == "allocate" and pool.num_free:
            held += pool.allocate(1)
        elif action == "register" and held:
            pool.register(held[number % len(held)], hash_of(number))
        elif action == "release" and held:
            pool.release([held.pop(number % len(held))])
        elif action == "take":
            take()
    take()
    assert known == {block_key(hash_of(number)) for number in range(31) if pool.find(hash_of(number)) is not None}
    assert log.take() is None


def test_a_manager_records_changes_only_on_request() -> None:
    pool = KVPool(num_blocks=4, block_size=4, max_model_len=16)
    for is_recorded in (False, True):
        manager = make_kv_cache_manager(pool, enable_prefix_caching=True, record_index_changes=is_recorded)
        request = make_request("a", list(range(9)))
        assert allocate(manager, request)
        request.num_computed_tokens = 8
        manager.commit(request)
        assert (manager.index_changes is not None) is is_recorded
    assert manager.index_changes is not None
    changes = manager.index_changes.take()
    assert changes is not None
    assert len(changes[0]) == 2


def test_keys_of_other_groups_are_not_recorded() -> None:
    """Their hashes have a suffix, and begin with the same bytes as that of the first group."""
    pool = BlockPool(2)
    log = record_changes(pool)
    first, second = pool.allocate(2)
    pool.register(first, hash_of(0))
    pool.register(second, hash_of(1) + b"\0\1")
    changes = log.take()
    assert changes is not None
    assert changes[0] == [block_key(hash_of(0))]
