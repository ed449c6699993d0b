from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from chairlift.core.baselines.arena import ARENAS, Arena, BlockRange, BuddyArena, FirstFitArena, power_of_two_above


@pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (128, 128), (129, 256)])
def test_power_of_two_above(count: int, power: int) -> None:
    assert power_of_two_above(count) == power


def test_the_vllm_papers_pool_holds_seven_requests_of_2048_slots() -> None:
    """Kwon et al., SOSP'23, Figure 13: "Orca (Max)" batches 7.00 requests in 15,728 slots = 983 blocks of 16."""
    arena = BuddyArena(983)
    pieces = [arena.allocate(2048 // 16) for _ in range(8)]
    assert all(piece is not None and piece.size == 128 for piece in pieces[:7])
    assert pieces[7] is None
    assert arena.num_free == 983 - 7 * 128


def test_buddies_merge_again() -> None:
    arena = BuddyArena(8)
    pieces = [arena.allocate(1) for _ in range(8)]
    assert arena.largest_free == 0
    for piece in pieces:
        assert piece is not None
        arena.release(piece)
    assert arena.largest_free == 8
    assert arena.allocate(8) == BlockRange(0, 8)


def test_free_neighbours_that_are_not_buddies_do_not_merge() -> None:
    arena = BuddyArena(4)
    first, second, third, fourth = (arena.allocate(1) for _ in range(4))
    assert second is not None
    assert third is not None
    arena.release(second)
    arena.release(third)
    assert arena.num_free == 2
    assert arena.allocate(2) is None
    assert first == BlockRange(0, 1)
    assert fourth == BlockRange(3, 1)


def test_first_fit_takes_the_lowest_gap_that_is_large_enough() -> None:
    arena = FirstFitArena(10)
    first, second = arena.allocate(3), arena.allocate(2)
    assert (first, second) == (BlockRange(0, 3), BlockRange(3, 2))
    assert first is not None
    arena.release(first)
    assert arena.allocate(4) == BlockRange(5, 4)
    assert arena.allocate(2) == BlockRange(0, 2)


class ArenaMachine(RuleBasedStateMachine):
    """Pieces never overlap, the counts agree, and an allocation succeeds exactly when a piece is large enough."""

    pieces = Bundle("pieces")

    @initialize(kind=st.sampled_from(sorted(ARENAS)), num_blocks=st.integers(1, 40))
    def start(self, kind: str, num_blocks: int) -> None:
        self.arena: Arena = ARENAS[kind](num_blocks)
        self.held: set[BlockRange] = set()
        assert self.arena.largest_free == self.arena.largest_piece

    @rule(target=pieces, count=st.integers(1, 40))
    def allocate(self, count: int) -> BlockRange | None:
        possible = self.arena.rounded_size(count) <= self.arena.largest_free
        before = self.arena.num_free
        piece = self.arena.allocate(count)
        assert (piece is not None) == possible
        if piece is None:
            assert self.arena.num_free == before
            return None
        assert piece.size == self.arena.rounded_size(count) >= count
        self.held.add(piece)
        return piece

    @rule(piece=consumes(pieces))
    def release(self, piece: BlockRange | None) -> None:
        if piece is not None:
            self.arena.release(piece)
            self.held.remove(piece)

    @invariant()
    def pieces_do_not_overlap_and_counts_agree(self) -> None:
        blocks = [block for piece in self.held for block in range(piece.start, piece.start + piece.size)]
        assert len(blocks) == len(set(blocks))
        assert all(0 <= block < self.arena.num_blocks for block in blocks)
        assert self.arena.num_free == self.arena.num_blocks - len(blocks)
        assert self.arena.largest_free <= self.arena.num_free
        if not self.held:
            assert self.arena.largest_free == self.arena.largest_piece


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
