"""Reservations of contiguous memory, and the arena that they are made in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from chairlift.core.baselines.arena import ARENAS, Arena, BlockRange, BuddyArena, FirstFitArena, power_of_two_above
from chairlift.core.baselines.reservations import RESERVATIONS
from chairlift.core.factory import KVPool, make_kv_cache_manager
from chairlift.errors import ConfigError, RequestError
from chairlift.events import RequestWaiting, Step
from support.fakes import expected_tokens, make_engine, make_request, run_to_end
from support.kv_invariants import check_manager

ARENA_NAMES = ["buddy", "first-fit"]


@pytest.mark.parametrize(("kv", "slots"), [("exact", 10 + 50 - 1), ("max", 256), ("pow2", 10 + 16 - 1), ("oracle", 20)])
def test_slots_that_each_policy_reserves(kv: str, slots: int) -> None:
    request = make_request("a", list(range(10)), max_tokens=50, output_len=11)
    assert RESERVATIONS[kv](FirstFitArena(64), 4, 256).reserved_slots(request) == slots


def test_pow2_is_capped_at_the_models_length() -> None:
    request = make_request("a", list(range(200)), max_tokens=56, output_len=40)
    assert RESERVATIONS["pow2"](FirstFitArena(64), 4, 256).reserved_slots(request) == 255


@pytest.mark.parametrize("kv", ["pow2", "oracle"])
def test_pow2_and_oracle_need_a_forced_length(kv: str) -> None:
    core, _, _, _ = make_engine(kv=kv)
    with pytest.raises(RequestError, match=r"^kv=pow2 and kv=oracle .* which is known only if it is forced"):
        core.add(make_request("a", [1, 2, 3]))


def test_an_error_names_the_largest_piece() -> None:
    core, _, _, _ = make_engine(kv="exact", num_blocks=12, block_size=4)
    core.add(make_request("fits", [1] * 16, max_tokens=17))
    with pytest.raises(RequestError, match=r"33 slots = 9 consecutive blocks of 4.*arena of 12 blocks has 8"):
        core.add(make_request("large", [1] * 16, max_tokens=18))


def test_max_raises_where_one_request_would_not_fit() -> None:
    pool = KVPool(num_blocks=12, block_size=4, max_model_len=40, kv="max")
    assert pool.max_request_slots == 32
    assert replace(pool, kv_arena="first-fit").max_request_slots == 48
    with pytest.raises(ConfigError, match="kv=max reserves max_model_len=40 slots = 10 consecutive blocks of 4"):
        make_kv_cache_manager(pool)


def test_a_wait_for_memory_counts_blocks_with_rounding() -> None:
    core, _, _, events = make_engine(kv="oracle", num_blocks=8, block_size=1, max_num_seqs=8)
    for index, length in enumerate((2, 3, 2)):
        core.add(make_request(str(index), [1] * 2, max_tokens=length, output_len=length))
    core.add(make_request("big", [1] * 3, max_tokens=3, output_len=3))
    run_to_end(core)
    wait = next(e for e in events.events if isinstance(e, RequestWaiting))
    assert (wait.request_id, wait.reason, wait.needed_blocks, wait.free_blocks) == ("2", "memory", 4, 0)


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=12), st.integers(1, 10), st.integers(0, 20)),
        min_size=1,
        max_size=8,
    ),
    kv=st.sampled_from(sorted(RESERVATIONS)),
    arena=st.sampled_from(ARENA_NAMES),
    num_blocks=st.integers(16, 40),
    block_size=st.sampled_from([2, 4]),
    budget=st.integers(4, 20),
    steps_ahead=st.integers(0, 1),
)
@settings(max_examples=150, deadline=None)
def test_reservations_give_the_same_tokens_without_preemption_and_free_all_blocks(
    requests: list[tuple[list[int], int, int]],
    kv: str,
    arena: str,
    num_blocks: int,
    block_size: int,
    budget: int,
    steps_ahead: int,
) -> None:
    core, manager, _, events = make_engine(
        kv=kv,
        arena=arena,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        steps_ahead=steps_ahead,
    )
    expected = {}
    for index, (prompt, length, slack) in enumerate(requests):
        max_tokens = min(length + slack, 32 - len(prompt))
        core.add(make_request(str(index), prompt, max_tokens, output_len=length))
        expected[str(index)] = expected_tokens(prompt, length)
    answers: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
        check_manager(manager)
    assert answers == expected
    assert manager.num_free_blocks == num_blocks
    assert not any(step.preempted for step in events.events if isinstance(step, Step))


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
