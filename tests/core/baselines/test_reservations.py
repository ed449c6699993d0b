from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.baselines.arena import FirstFitArena
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
