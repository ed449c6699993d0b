"""Orders of eviction: what is expected to be used last is evicted first, and every block is returned."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.kv.block_pool import BlockPool
from chairlift.core.kv.eviction_order import (
    EVICTION_ORDERS,
    MAX_KINDS,
    MIN_OBSOLETE,
    EvictionOrder,
    ExpectedUse,
    ReturnGaps,
)
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.request import FinishReason, Request
from chairlift.sampling_params import SamplingParams
from support.kv_invariants import check_manager, make_paged_manager

BLOCK_SIZE = 2
CALL, ANSWER = [90, 91], [90, 92]
"""The ends of outputs: a tool call, and an answer that nothing follows."""


class Turns:
    """Runs requests on a manager of KV memory, without a scheduler."""

    def __init__(self, num_blocks: int, policy: str = "expected-use") -> None:
        self.manager: PagedKVCacheManager = make_paged_manager(
            num_blocks, BLOCK_SIZE, prefix_cache_eviction_policy=policy
        )
        self.now = 0.0
        self.num_requests = 0

    @property
    def order(self) -> EvictionOrder:
        return self.manager.pool.order

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.manager.begin_step(self.now)

    def wait(self, prompt: list[int], **params: Any) -> Request:
        """Queue a request."""
        request = Request(f"r{self.num_requests}", prompt, SamplingParams(**params), 8, arrival_time=self.now)
        request.arrival_index = self.num_requests
        self.num_requests += 1
        self.manager.prefixes.expect(request)
        return request

    def start(self, request: Request) -> bool:
        """Admit a request and compute its prompt; False if memory is short."""
        if (num_computed := self.manager.allocate(request)) is None:
            return False
        request.num_computed_tokens = num_computed
        return True

    def end(self, request: Request, output: list[int], reason: FinishReason = FinishReason.STOP) -> None:
        """Finish a running request with this output."""
        request.token_ids += output
        request.num_tokens = len(request.token_ids)
        assert self.manager.grow(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
        request.finish_reason = reason
        self.manager.free(request)
        self.manager.forget(request)

    def turn(self, prompt: list[int], output: list[int], **params: Any) -> list[int]:
        """Run a request to its end; returns its tokens."""
        request = self.wait(prompt, **params)
        assert self.start(request)
        self.end(request, output)
        return request.token_ids

    def num_cached(self, tokens: list[int]) -> int:
        """The number of cached tokens at the beginning of a prompt."""
        request = Request("find", [*tokens, 0], SamplingParams(), 1)
        count = self.manager.num_cached_tokens(request)
        self.manager.prefixes.forget(request)
        return count

    def evict(self, num_blocks: int) -> None:
        """Let a request without a future take this number of blocks."""
        request = Request("evict", [1000 + self.num_requests] * (num_blocks * BLOCK_SIZE), SamplingParams(), 1)
        self.num_requests += 1
        assert self.start(request)
        request.finish_reason = FinishReason.ABORT
        self.manager.free(request)
        self.manager.forget(request)


def test_a_request_may_get_tokens_while_it_waits() -> None:
    """Those of the steps that were running when it was preempted, which fill a block."""
    turns = Turns(8)
    request = turns.wait([1, 2, 3])
    request.token_ids += [4, 5]
    request.num_tokens = len(request.token_ids)
    assert turns.start(request)
    turns.end(request, ANSWER)


def prompt(number: int, length: int = 8) -> list[int]:
    return [number * 10 + index for index in range(length)]


def teach(turns: Turns) -> None:
    """Let turns follow calls within a second, and answers after minutes; nothing stays cached."""
    for number in range(1, 9):
        answered = turns.turn(prompt(2 * number), ANSWER)
        called = turns.turn(prompt(2 * number + 1), CALL)
        turns.advance(0.5)
        turns.turn([*called, 1], [7, 7])
        turns.advance(300.0)
        turns.turn([*answered, 1], [7, 7])
    turns.evict(turns.manager.num_blocks)


def test_the_prefix_of_a_waiting_request_is_kept_and_that_of_the_last_one_goes_first() -> None:
    turns = Turns(15)
    sessions = [turns.turn(prompt(number), CALL) for number in range(3)]
    waiting = [turns.wait([*tokens, 5]) for tokens in sessions[:2]]
    turns.evict(5)
    assert [turns.num_cached(tokens) for tokens in sessions] == [10, 10, 0]
    turns.evict(7)
    assert [turns.num_cached(tokens) for tokens in sessions] == [10, 6, 0]
    turns.manager.forget(waiting[0])  # aborted
    turns.evict(12)
    assert [turns.num_cached(tokens) for tokens in sessions] == [0, 6, 0]
    check_manager(turns.manager)


def test_least_recently_used_does_not_look_at_the_queue() -> None:
    turns = Turns(15, "lru")
    sessions = [turns.turn(prompt(number), CALL) for number in range(3)]
    turns.wait([*sessions[0], 5])
    turns.evict(5)
    assert [turns.num_cached(tokens) for tokens in sessions] == [0, 10, 10]


def test_the_gap_after_an_ending_is_learned() -> None:
    turns = Turns(100)
    teach(turns)
    called = turns.turn(prompt(50), CALL)
    turns.advance(0.5)
    answered = turns.turn(prompt(60), ANSWER)
    turns.evict(95)
    assert (turns.num_cached(called), turns.num_cached(answered)) == (10, 0)
    turns.advance(1000.0)
    answered = turns.turn(prompt(60), ANSWER)
    turns.evict(95)
    assert (turns.num_cached(called), turns.num_cached(answered)) == (0, 10), "long idle prefixes are given up"


def test_an_answer_after_calls_makes_its_whole_session_late_but_not_what_others_share() -> None:
    turns = Turns(100)
    teach(turns)
    system = prompt(70, 4)
    called = turns.turn([*system, 1, 2], CALL)
    other = turns.turn([*system, 3, 4], CALL)
    turns.advance(0.1)
    other = turns.turn([*other, 5, 5], ANSWER)
    turns.evict(96)
    assert (turns.num_cached(called), turns.num_cached(other)) == (8, 4)


def test_retention_and_keys_are_honoured() -> None:
    turns = Turns(200)
    for number in range(1, 9):
        tokens = turns.turn(prompt(number), ANSWER)
        quick = turns.turn(prompt(20 + number), ANSWER, prompt_cache_key="quick")
        turns.advance(0.2)
        turns.turn([*quick, 1], [7, 7])
        turns.advance(400.0)
        turns.turn([*tokens, 1], [7, 7])
    turns.evict(200)
    kept = turns.turn(prompt(50), ANSWER, prompt_cache_retention="24h")
    quick = turns.turn(prompt(60), ANSWER, prompt_cache_key="quick")
    plain = turns.turn(prompt(70), ANSWER)
    turns.evict(190)
    assert [turns.num_cached(tokens) for tokens in (kept, quick, plain)] == [10, 10, 0]


def test_what_an_aborted_request_added_goes_first() -> None:
    turns = Turns(20)
    session = turns.turn(prompt(1), CALL)
    request = turns.wait([*session, *prompt(5)])
    assert turns.start(request)
    turns.end(request, [3, 3], FinishReason.ABORT)
    later = turns.turn(prompt(2), CALL)
    turns.evict(10)
    assert turns.num_cached(session) == turns.num_cached(later) == 10
    assert turns.num_cached(request.token_ids) == 10


def test_a_gap_with_few_returns_is_close_to_that_of_all() -> None:
    gaps = ReturnGaps()
    for _ in range(100):
        gaps.record(("", "call"), 1.0, 1)
        gaps.record(("", "answer"), 100.0, 1)
    gaps.record(("", "once"), 1000.0, 0)
    assert gaps.expected(("", "call")) < 4
    assert gaps.expected(("", "answer")) > 90
    assert 40 < gaps.expected(("", "new")) < 70 < gaps.expected(("", "once")) < 400
    for number in range(2 * MAX_KINDS):
        gaps.record(("", number), 1.0, 1)
    assert len(gaps._seen) == MAX_KINDS


def test_the_order_of_waiting_requests_does_not_grow() -> None:
    turns = Turns(8)
    tokens = turns.turn(prompt(1), CALL)
    for _ in range(500):
        request = turns.wait([*tokens, 5])
        turns.evict(3)
        assert turns.start(request)
        turns.end(request, CALL)
    assert isinstance(order := turns.order, ExpectedUse)
    assert len(order._order) <= MIN_OBSOLETE + 17
    assert not order._waiting
    assert not order._demands
    assert not order._continued


Step = tuple[str, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "start", "end", "abort", "drop", "advance", "evict"]),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=60,
)


def run(policy: str, steps: list[Step], check: Callable[[Turns], None]) -> list[Any]:
    """Run steps; returns what was cached of each session after each of them."""
    turns, waiting, running, seen = Turns(14, policy), list[Request](), list[Request](), list[Any]()
    for what, first, second in steps:
        if what == "wait":
            tokens = [9, 9, first % 3, first % 3, *([first] * 2 * second)]
            waiting.append(turns.wait(tokens, prompt_cache_key=str(second) if second % 2 else None))
        elif what == "start" and waiting and turns.start(waiting[first % len(waiting)]):
            running.append(waiting.pop(first % len(waiting)))
        elif what in ("end", "abort") and running:
            if turns.manager.num_free_blocks > 2:
                reason = FinishReason.STOP if what == "end" else FinishReason.ABORT
                turns.end(running.pop(first % len(running)), [second, second], reason)
        elif what == "drop" and waiting:
            turns.manager.forget(waiting.pop(first % len(waiting)))
        elif what == "advance":
            turns.advance(4.0**second)
        elif what == "evict" and turns.manager.num_free_blocks > first:
            turns.evict(1 + first)
        check(turns)
        seen.append(sorted(turns.manager.pool._block_by_hash))
    for request in running:
        request.finish_reason = FinishReason.STOP
        turns.manager.free(request)
    for request in running + waiting:
        turns.manager.forget(request)
    assert sorted(turns.manager.pool.allocate(14)) == list(range(14)), "every block is returned"
    assert not turns.manager.pool._block_by_hash
    return seen


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_counts_agree_and_equal_steps_give_equal_decisions(policy: str, steps: list[Step]) -> None:
    def check(turns: Turns) -> None:
        pool = turns.manager.pool
        check_manager(turns.manager)
        assert len(turns.order) == pool.num_free == len(list(turns.order))

    assert run(policy, steps, check) == run(policy, steps, lambda _: None)


@pytest.mark.parametrize("policy", EVICTION_ORDERS)
@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_no_block_is_evicted_before_one_that_continues_it(policy: str, steps: list[Step]) -> None:
    parents: dict[bytes, bytes] = {}

    def check(turns: Turns) -> None:
        for chain in turns.manager.prefixes._chains.values():  # type: ignore[attr-defined]
            parents.update(zip(chain[1:], chain, strict=False))
        cached = turns.manager.pool._block_by_hash
        for block in cached:
            assert parents.get(block, block) in cached, "a cached block whose beginning was evicted"

    run(policy, steps, check)


def test_a_pool_without_a_policy_is_least_recently_used() -> None:
    pool, rng = BlockPool(6), random.Random(0)
    blocks = pool.allocate(6)
    rng.shuffle(blocks)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.release(blocks)
    assert pool.allocate(6) == blocks
