from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.errors import RequestError
from chairlift.outputs import SchedulerOutput
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams
from support.fakes import allocate, make_request
from support.kv_invariants import check_manager, make_paged_manager


def admit_and_compute(manager: PagedKVCacheManager, request: Request) -> None:
    assert allocate(manager, request)
    request.num_computed_tokens = request.num_tokens
    manager.commit(request)


def test_an_error_shows_the_arithmetic() -> None:
    manager = make_paged_manager(num_blocks=4, block_size=4)
    manager.check_fits(make_request("fits", [1] * 10, max_tokens=7))
    with pytest.raises(RequestError, match=r"10 prompt tokens and up to 8 output.*17 slots = 5 blocks of 4.*has 4"):
        manager.check_fits(make_request("large", [1] * 10, max_tokens=8))


def test_a_prefix_hit_leaves_one_token_to_compute() -> None:
    manager = make_paged_manager(num_blocks=8, block_size=4)
    first = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8])
    admit_and_compute(manager, first)
    twin = make_request("b", [1, 2, 3, 4, 5, 6, 7, 8])
    assert allocate(manager, twin)
    assert twin.num_computed_tokens == 4
    (shared,), (table,) = manager.block_tables(twin), manager.block_tables(first)
    assert shared[0] == table[0]
    assert shared[1] != table[1]


def test_a_freed_prefix_is_found_again_and_counted_as_needed() -> None:
    manager = make_paged_manager(num_blocks=4, block_size=4)
    first = make_request("a", list(range(9)))
    admit_and_compute(manager, first)
    manager.free(first)
    again = make_request("b", list(range(9)))
    demand = manager.demand(again)
    assert (demand.needed, demand.free, demand.evictable) == (3, 4, 2)
    assert allocate(manager, again)
    assert again.num_computed_tokens == 8


def test_prompt_logprobs_skip_the_cache() -> None:
    manager = make_paged_manager(num_blocks=8, block_size=4)
    admit_and_compute(manager, make_request("a", list(range(9))))
    params = SamplingParams(prompt_logprobs=1)
    assert allocate(manager, request := Request("b", list(range(9)), params, 8))
    assert request.num_computed_tokens == 0


def test_without_a_cache_siblings_share_the_leaders_prompt_and_other_requests_do_not() -> None:
    manager = make_paged_manager(num_blocks=12, block_size=4, enable_prefix_caching=False)
    leader = make_request("a", list(range(9)))
    admit_and_compute(manager, leader)
    sibling = make_request("b", list(range(9)), leader_id="a")
    other = make_request("c", list(range(9)))
    assert allocate(manager, sibling)
    assert allocate(manager, other)
    assert sibling.num_computed_tokens == 8
    assert other.num_computed_tokens == 0
    check_manager(manager)


class ManagerMachine(RuleBasedStateMachine):
    """Random allocations, growth and frees: a failure changes nothing, and only full, computed blocks are shared."""

    running = Bundle("running")

    swapped = Bundle("swapped")

    @initialize(
        num_blocks=st.integers(2, 16),
        block_size=st.sampled_from([1, 2, 4]),
        caching=st.booleans(),
        num_swap_blocks=st.integers(0, 12),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool, num_swap_blocks: int) -> None:
        self.manager = make_paged_manager(num_blocks, block_size, caching, num_swap_blocks=num_swap_blocks)
        self.count = 0

    def snapshot(self) -> tuple[object, ...]:
        pool = self.manager.pool
        return (tuple(pool._references), tuple(pool._hashes), pool.num_free, pool.num_evictable)

    @rule(target=running, length=st.integers(1, 20), flavour=st.integers(0, 1))
    def admit(self, length: int, flavour: int) -> Request | None:
        self.count += 1
        request = make_request(str(self.count), [flavour] * length, max_tokens=64)
        demand = self.manager.demand(request)
        before = self.snapshot()
        if not allocate(self.manager, request):
            assert demand.needed > demand.free
            assert self.snapshot() == before
            self.manager.forget(request)
            return None
        assert before[2] - self.manager.num_free_blocks == demand.needed
        assert request.num_computed_tokens < request.num_tokens <= request.num_slots
        return request

    @rule(request=running, count=st.integers(1, 6))
    def compute(self, request: Request | None, count: int) -> None:
        if request is not None and request.request_id in self.manager._tables:
            request.num_computed_tokens = min(request.num_computed_tokens + count, request.num_tokens)
            self.manager.commit(request)

    @rule(request=running)
    def decode(self, request: Request | None) -> None:
        if request is None or request.request_id not in self.manager._tables:
            return
        if request.num_tokens < request.num_slots:
            return
        before = self.snapshot()
        (table,) = map(list, self.manager.block_tables(request))
        change = self.manager.grow(request, request.num_slots + 1)
        if change is None:
            assert self.snapshot() == before
            assert self.manager.num_free_blocks == 0
        else:
            assert change.released == []
            assert self.manager.block_tables(request) == [table + change.added[0]]
            request.token_ids.append(0)
            request.num_tokens += 1

    @rule(target=swapped, request=consumes(running))
    def preempt(self, request: Request | None) -> Request | None:
        if request is None:
            return None
        needed, used = -(-request.num_computed_tokens // self.manager.block_size), self.manager.counts().num_swap_blocks
        has_space = needed <= self.manager.copies.swap_space.num_blocks - used
        is_computed = request.num_computed_tokens == request.num_tokens  # so that a step would have nothing to compute
        is_swapped = self.manager.swap_out(request)
        assert is_swapped is (has_space and not is_computed and self.manager.copies.swap_space.num_blocks > 0)
        assert self.manager.counts().num_swap_blocks == used + needed * is_swapped
        self.manager.free(request)
        if not is_swapped:
            request.num_computed_tokens = 0
        return request

    @rule(target=running, request=consumes(swapped))
    def resume(self, request: Request | None) -> Request | None:
        if request is None:
            return None
        num_computed, before, used = request.num_computed_tokens, self.snapshot(), self.manager.counts().num_swap_blocks
        if not allocate(self.manager, request):
            assert self.snapshot() == before
            assert self.manager.counts().num_swap_blocks == used
            self.manager.forget(request)
            return None
        self.manager.plan_step(SchedulerOutput(0, {}), [])
        assert num_computed <= request.num_computed_tokens < request.num_tokens
        assert request.request_id not in self.manager.copies.swap_space
        return request

    @rule(request=consumes(running))
    def free(self, request: Request | None) -> None:
        if request is not None:
            self.manager.free(request)
            self.manager.forget(request)

    @invariant()
    def tables_and_counts_agree(self) -> None:
        check_manager(self.manager)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
