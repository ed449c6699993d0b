"""The recorded changes of the prefix cache: applied in order, they give the index of the pool."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.kv.block_pool import BlockPool, block_key


def hash_of(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


@given(st.lists(st.tuples(st.sampled_from(["allocate", "register", "release", "take"]), st.integers(0, 30))))
def test_the_changes_give_the_index(actions: list[tuple[str, int]]) -> None:
    pool, held, known = BlockPool(4), list[int](), set[int]()
    pool.record_changes()

    def take() -> None:
        if (changes := pool.take_changes()) is not None:
            assert changes.stored or changes.removed
            assert not set(changes.stored) & set(changes.removed)
            known.difference_update(changes.removed)
            known.update(changes.stored)

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
    assert pool.take_changes() is None


def test_a_pool_records_nothing_unless_it_has_to() -> None:
    pool = BlockPool(1)
    pool.register(pool.allocate(1)[0], hash_of(0))
    assert pool.take_changes() is None


def test_keys_of_other_groups_are_not_recorded() -> None:
    """Their hashes have a suffix, and begin with the same bytes as that of the first group."""
    pool = BlockPool(2)
    pool.record_changes()
    first, second = pool.allocate(2)
    pool.register(first, hash_of(0))
    pool.register(second, hash_of(1) + b"\0\1")
    changes = pool.take_changes()
    assert changes is not None
    assert changes.stored == [block_key(hash_of(0))]
