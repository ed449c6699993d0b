from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from chairlift.core.kv.block_pool import BlockPool
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
