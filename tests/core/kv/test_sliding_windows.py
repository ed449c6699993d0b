"""Blocks that left the window of their layers are released, not earlier, and are found by later requests."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from chairlift.core.kv.block_tables import NO_BLOCK, held_blocks
from chairlift.core.kv.kv_groups import FULL, KVGroups
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.events import Step
from chairlift.request import Request
from support.fakes import allocate, expected_tokens, make_engine, make_request, run_to_end
from support.kv_invariants import check_manager, make_paged_manager

BLOCK_SIZE = 4
WINDOWS = (None, 6, 6)


def make_manager(num_blocks: int = 64, enable_prefix_caching: bool = True) -> PagedKVCacheManager:
    return make_paged_manager(num_blocks, BLOCK_SIZE, enable_prefix_caching, windows=WINDOWS, max_chunk=8)


def admit(manager: PagedKVCacheManager, request: Request) -> Request:
    assert allocate(manager, request)
    return request


def compute(manager: PagedKVCacheManager, request: Request, count: int) -> None:
    """Compute tokens as the scheduler does: memory first, then progress, then the cache."""
    end = request.num_computed_tokens + count
    if end > request.num_slots:
        assert manager.grow(request, end) is not None
    request.num_computed_tokens = end
    manager.commit(request)


def test_admission_takes_the_blocks_of_all_tokens_without_a_window_and_those_of_a_chunk_with_one() -> None:
    manager = make_manager()
    request = admit(manager, make_request("a", list(range(30))))
    assert [len(table) for table in manager.block_tables(request)] == [8, 0, 0]
    compute(manager, request, 8)
    assert [len(table) for table in manager.block_tables(request)] == [8, 2, 2]


def test_a_block_is_released_when_the_next_query_no_longer_reads_its_last_token() -> None:
    manager = make_manager()
    request = admit(manager, make_request("a", list(range(30))))
    compute(manager, request, 8)
    assert manager.grow(request, 9) is not None  # the query at position 8 reads tokens 3 to 8
    assert [held_blocks([table]) for table in manager.block_tables(request)][1] == manager.block_tables(request)[1]
    request.num_computed_tokens = 9
    change = manager.grow(request, 13)  # the query at position 9 reads tokens 4 to 9
    assert change is not None
    assert len(change.released) == 2
    assert [table[0] == NO_BLOCK for table in manager.block_tables(request)] == [False, True, True]
    check_manager(manager)


def test_decodes_hold_a_window() -> None:
    manager = make_manager()
    request = admit(manager, make_request("a", list(range(30)), max_tokens=20))
    for count in (8, 8, 8, 6, *[1] * 15):
        request.num_tokens = max(request.num_tokens, request.num_computed_tokens + count)
        compute(manager, request, count)
    held = [len(held_blocks([table])) for table in manager.block_tables(request)]
    assert held == [12, 3, 3]
    assert sum(held) < manager.worst_case_blocks(request) == 13 + 2 * 5


def test_a_hit_needs_the_last_window_only() -> None:
    manager = make_manager(num_blocks=40)
    first = admit(manager, make_request("a", list(range(30))))
    for count in (8, 8, 8, 6):
        compute(manager, first, count)
    held = manager.block_tables(first)
    released = [index for index, block_id in enumerate(held[1]) if block_id == NO_BLOCK]
    assert released == [0, 1, 2, 3]
    manager.pool.allocate(manager.pool.num_free)  # evicts the released blocks
    twin = make_request("b", list(range(30)))
    tables = manager._shared_prefix(twin)
    assert [len(table) for table in tables] == [7, 7, 7]
    assert tables[0] == held[0][:7]
    assert tables[1] == [NO_BLOCK] * 5 + held[1][5:7]
    shorter = make_request("c", list(range(18)))
    assert manager._shared_prefix(shorter) == [[], [], []], "tokens 11 to 15 have no block in the groups with a window"


def test_released_blocks_are_found_while_they_are_cached() -> None:
    manager = make_manager()
    first = admit(manager, make_request("a", list(range(30))))
    for count in (8, 8, 8, 6):
        compute(manager, first, count)
    shorter = admit(manager, make_request("b", list(range(18))))
    assert shorter.num_computed_tokens == 16
    check_manager(manager)


def test_siblings_share_the_windows_of_their_leader_without_a_cache() -> None:
    manager = make_manager(enable_prefix_caching=False)
    leader = admit(manager, make_request("a", list(range(30))))
    for count in (8, 8, 8, 6):
        compute(manager, leader, count)
    sibling = admit(manager, make_request("b", list(range(30)), leader_id="a"))
    assert sibling.num_computed_tokens == 28
    check_manager(manager)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 9)), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    num_tokens=st.integers(0, 60),
    cached=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=12),
)
def test_the_longest_hit_is_that_of_a_search(
    windows: list[int | None], block_size: int, num_tokens: int, cached: list[list[bool]]
) -> None:
    assume(windows == [None] or any(windows))
    groups = KVGroups(tuple(windows), block_size, 8)
    columns = [[7 if is_cached else None for is_cached in row[: len(windows)]] for row in cached]

    def can_share(length: int) -> bool:
        end = length * block_size
        read = [
            {token // block_size for token in range(0 if window is None else max(0, end - window + 1), end)}
            for window in windows
        ]
        return all(cached[index][group] for group, indices in enumerate(read) for index in indices)

    lengths = [length for length in range(len(columns) + 1) if can_share(length)]
    tables = groups.longest_hit(columns)
    assert {len(table) for table in tables} == {max(lengths)}
    assert groups.first_blocks(num_tokens) == [
        0 if window is None else max(0, num_tokens - window + 1) // block_size for window in windows
    ]


class WindowMachine(RuleBasedStateMachine):
    """Random requests against a model: the tokens that a later query reads, and the blocks that they were written to.

    A block with such tokens is held by the request, in the same place, until it is freed.
    """

    running = Bundle("running")

    @initialize(
        num_blocks=st.integers(6, 40),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        windows=st.sampled_from([(3,), (None, 5), (None, 2, 7)]),
        max_chunk=st.integers(1, 9),
    )
    def start(
        self, num_blocks: int, block_size: int, caching: bool, windows: tuple[int | None, ...], max_chunk: int
    ) -> None:
        self.manager = make_paged_manager(num_blocks, block_size, caching, windows=windows, max_chunk=max_chunk)
        self.max_chunk = max_chunk
        self.written: dict[tuple[str, int, int], int] = {}
        self.count = 0

    @rule(target=running, length=st.integers(1, 24), flavour=st.integers(0, 1))
    def admit(self, length: int, flavour: int) -> Request | None:
        self.count += 1
        request = make_request(str(self.count), [flavour] * length, max_tokens=40)
        free, demand = self.manager.num_free_blocks, self.manager.demand(request)
        if not allocate(self.manager, request):
            assert demand.needed > demand.free
            assert self.manager.num_free_blocks == free
            return None
        assert free - self.manager.num_free_blocks <= demand.needed
        self.record(request)
        return request

    @rule(request=running, count=st.integers(1, 9))
    def compute(self, request: Request | None, count: int) -> None:
        if request is None or request.request_id not in self.manager._tables:
            return
        if request.num_computed_tokens == request.num_tokens:
            request.token_ids.append(0)
            request.num_tokens += 1
        end = min(request.num_computed_tokens + min(count, self.max_chunk), request.num_tokens)
        if end > request.num_slots:
            before, free = [list(table) for table in self.manager.block_tables(request)], self.manager.num_free_blocks
            if self.manager.grow(request, end) is None:
                assert self.manager.block_tables(request) == before
                assert self.manager.num_free_blocks == free
                return
        request.num_computed_tokens = end
        self.manager.commit(request)
        self.record(request)
        most = self.manager.groups.most_blocks(request.num_tokens)
        held = [len(held_blocks([table])) for table in self.manager.block_tables(request)]
        assert all(count <= limit for count, limit in zip(held, most, strict=True))

    def record(self, request: Request) -> None:
        """Check the blocks of the tokens that a later query reads, and record those of new tokens."""
        size, computed = self.manager.block_size, request.num_computed_tokens
        for group, (window, table) in enumerate(
            zip(self.manager.windows, self.manager.block_tables(request), strict=True)
        ):
            first = 0 if window is None else max(0, computed - window + 1)
            for token in range(first, computed):
                block_id = table[token // size]
                assert block_id != NO_BLOCK
                assert self.written.setdefault((request.request_id, group, token), block_id) == block_id

    @rule(request=consumes(running))
    def free(self, request: Request | None) -> None:
        if request is not None:
            self.manager.free(request)
            self.manager.forget(request)

    @invariant()
    def tables_and_counts_agree(self) -> None:
        check_manager(self.manager)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_long_request_runs_in_a_pool_that_does_not_hold_its_windows_whole() -> None:
    prompt = [token % 7 for token in range(100)]
    answers, peaks = [], []
    for windows in (WINDOWS, FULL):
        core, manager, _, events = make_engine(
            num_blocks=100, max_num_batched_tokens=8, windows=windows, enable_prefix_caching=False
        )
        core.add(make_request("a", prompt, 20))
        answers.append(run_to_end(core)["a"])
        steps = [event for event in events.events if isinstance(event, Step)]
        peaks.append(max(manager.num_blocks - step.free_blocks for step in steps))
        released = sum(len(blocks) for step in steps for blocks in step.released_blocks.values())
        held = sum(len(blocks) for step in steps for blocks in step.new_blocks.values())
        assert held - released == (30 + 2 * 3 if windows == WINDOWS else 30)
    assert answers == [expected_tokens(prompt, 20)] * 2
    assert peaks == [30 + 2 * 3, 30]
