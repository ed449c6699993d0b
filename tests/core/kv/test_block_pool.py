"""The pool of blocks, and the recorded changes of its prefix cache."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.index_changes import IndexChangeLog, block_key
from support.fakes import allocate, make_request
from support.kv_invariants import check_pool


def test_plain_blocks_are_reused_before_a_cached_one_is_evicted() -> None:
    pool = BlockPool(3)
    cached, plain = pool.allocate(2)
    pool.register(cached, b"prefix")
    pool.release([plain, cached])
    assert pool.allocate(2) == [plain, 2]
    assert pool.find(b"prefix") == cached
    assert pool.allocate(1) == [cached]
    assert pool.find(b"prefix") is None


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.release([blocks[1], blocks[0], blocks[2]])
    pool.share([blocks[1]])
    pool.release([blocks[1]])
    assert [pool.allocate(1)[0] for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_equal_contents_keep_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"same")
    pool.register(second, b"same")
    assert pool.find(b"same") == first
    assert pool._hashes[second] is None


def test_a_held_block_replaces_a_free_one_with_the_same_content() -> None:
    pool = BlockPool(3)
    (first,) = pool.allocate(1)
    pool.register(first, b"same")
    pool.release([first])
    second, other = pool.allocate(2)
    pool.register(second, b"same")
    assert pool.find(b"same") == second
    assert pool.num_evictable == 0
    assert pool.allocate(1) == [first]
    assert pool.find(b"same") == second
    pool.release([other])
    check_pool(pool)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model of sets and counts."""

    holdings = Bundle("holdings")

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held = [0] * num_blocks

    @rule(target=holdings, data=st.data())
    def allocate(self, data: st.DataObject) -> list[int]:
        count = data.draw(st.integers(0, self.pool.num_free))
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        for block in blocks:
            assert self.held[block] == 0
            assert self.pool._hashes[block] is None
            self.held[block] = 1
        return blocks

    @rule(blocks=consumes(holdings))
    def release(self, blocks: list[int]) -> None:
        self.pool.release(reversed(blocks))
        for block in blocks:
            self.held[block] -= 1

    @rule(target=holdings, blocks=holdings)
    def share_held(self, blocks: list[int]) -> list[int]:
        self.pool.share(blocks)
        for block in blocks:
            self.held[block] += 1
        return blocks

    @rule(blocks=holdings, key=st.integers(0, 5))
    def register(self, blocks: list[int], key: int) -> None:
        if blocks and self.pool._hashes[blocks[0]] is None:
            self.pool.register(blocks[0], bytes([key]))
            assert self.pool.find(bytes([key])) is not None

    @rule(target=holdings, key=st.integers(0, 5))
    def hit(self, key: int) -> list[int]:
        block = self.pool.find(bytes([key]))
        if block is None:
            return []
        self.pool.share([block])
        self.held[block] += 1
        return [block]

    @invariant()
    def counts_agree(self) -> None:
        check_pool(self.pool)
        assert self.pool.num_free == self.held.count(0)
        assert self.pool._references == self.held


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
