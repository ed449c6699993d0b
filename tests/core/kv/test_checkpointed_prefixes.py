"""A prefix is shared where its recurrent state is known; checkpoints are where later requests need them."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.engine_core import EngineCore
from chairlift.core.kv.checkpointed_prefixes import CheckpointedPrefixes
from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.core.kv.uncached_prefixes import NoPrefixes
from chairlift.core.speculation.prompt_lookup import Proposal
from chairlift.errors import RequestError
from chairlift.events import RequestFinished, Step
from chairlift.request import Request
from support.fakes import (
    CheckingExecutor,
    PartlyRightProposals,
    collect,
    expected_tokens,
    make_engine,
    make_request,
    prefix_key,
    run_to_end,
)
from support.kv_invariants import check_manager

BLOCK_SIZE = 16


class StateExecutor(CheckingExecutor):
    """Checks states only, because a check of each slot takes long if sequences are long."""

    def _write(self, request_id: str, count: int) -> None:
        self.computed[request_id] += count

    def _check(self, request_id: str, count: int) -> None:
        return


def make_hybrid_engine(
    num_slots: int = 64, interval: int = 1024, checks_slots: bool = True, **options: object
) -> tuple[object, ...]:
    defaults: dict[str, object] = {
        "num_blocks": 4000,
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": 512,
        "max_model_len": 30_000,
        "checkpoints": CheckpointPlan(num_slots, interval),
    }
    core, manager, executor, events = make_engine(**{**defaults, **options})  # type: ignore[arg-type]
    if not checks_slots:
        executor.__class__ = StateExecutor
    return core, manager, executor, events


def answer(core: EngineCore, name: str, prompt: list[int], max_tokens: int = 4) -> list[int]:
    """Run one request alone to its end."""
    core.add(make_request(name, prompt, max_tokens))
    return run_to_end(core)[name]


def num_cached(events: Iterable[object]) -> list[int]:
    return [event.num_cached_tokens for event in events if isinstance(event, RequestFinished)]


def num_computed(events: Iterable[object]) -> int:
    return sum(sum(event.num_scheduled) for event in events if isinstance(event, Step))


def tokens(seed: int, count: int) -> list[int]:
    """The first tokens of a sequence that depends on the seed only."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


@pytest.mark.parametrize(("num_shared", "num_unique"), [(1600, 600), (1500, 700)])
def test_almost_all_requests_hit_a_shared_prefix_whatever_its_length_is(num_shared: int, num_unique: int) -> None:
    """The two cases of vLLM's issue 45238, with 64 requests one after the other."""
    core, _, _, events = make_hybrid_engine(checks_slots=False)
    shared = tokens(0, num_shared)
    for index in range(64):
        answer(core, str(index), shared + tokens(index + 1, num_unique))
    cached = num_cached(events.events)
    border = num_shared // BLOCK_SIZE * BLOCK_SIZE
    assert cached == [0, 1024, *[border] * 62]


def test_requests_that_run_together_hit_a_shared_prefix_after_the_first_one() -> None:
    core, _, _, events = make_hybrid_engine(checks_slots=False, max_num_seqs=8)
    shared = tokens(0, 1600)
    answer(core, "first", shared + tokens(1, 600))
    for index in range(63):
        core.add(make_request(str(index), shared + tokens(index + 2, 600), 4))
    run_to_end(core)
    assert all(num_cached(events.events)[1:])


def test_a_conversation_computes_its_new_tokens_and_at_most_one_block_again() -> None:
    core, _, _, events = make_hybrid_engine(checks_slots=False)
    history: list[int] = []
    rng = random.Random(3)
    for turn in range(43):
        prompt = history + [rng.randrange(1000) for _ in range(rng.randint(1, 300))]
        before = num_computed(events.events)
        max_tokens = rng.randint(1, 100)
        reply = answer(core, str(turn), prompt, max_tokens)
        num_new = len(prompt) + max_tokens - 1 - len(history)
        # K, V and state of the last token of the answer before are never computed.
        assert num_computed(events.events) - before <= num_new + 1 + BLOCK_SIZE
        history = prompt + reply


def test_the_checkpoint_of_an_output_replaces_the_one_before() -> None:
    core, manager, executor, _ = make_hybrid_engine()
    answer(core, "a", tokens(1, 40), max_tokens=100)
    written = [position for output in executor.outputs for position, _ in output.checkpoints.get("a", [])]
    assert written == [32, 48, 64, 80, 96, 112, 128]
    assert manager.prefixes.checkpoints.num_used == 2, "the end of the prompt, and the end of the output"
    assert answer(core, "b", tokens(1, 40) + expected_tokens(tokens(1, 40), 100), 1)
    assert executor.outputs[-1].new_requests[0].num_computed_tokens == 128


def test_checkpoints_at_multiples_of_the_interval_are_kept() -> None:
    core, manager, executor, events = make_hybrid_engine(interval=64)
    answer(core, "a", tokens(1, 300), max_tokens=100)
    written = [position for output in executor.outputs for position, _ in output.checkpoints.get("a", [])]
    assert [position for position in written if position <= 300] == [64, 128, 192, 256, 288]
    kept = {64, 128, 192, 256, 288, 320, 384}
    assert manager.prefixes.checkpoints.num_used == len(kept)
    answer(core, "b", tokens(1, 200) + tokens(2, 50))
    assert num_cached(events.events)[1] == 192


def test_a_request_writes_a_checkpoint_where_it_stops_to_match_cached_blocks() -> None:
    core, manager, _, events = make_hybrid_engine()
    answer(core, "a", tokens(1, 400))
    answer(core, "b", tokens(1, 200) + tokens(2, 50))
    (finished,) = [e for e in events.events if isinstance(e, RequestFinished) and e.request_id == "b"]
    assert finished.num_cached_tokens == 0
    answer(core, "c", tokens(1, 200) + tokens(3, 50))
    assert num_cached(events.events) == [0, 0, 192]
    matched = {name: count for e in events.events if isinstance(e, Step) for name, count in e.num_matched.items()}
    assert matched == {"b": 192}, "the step of its admission has the reason why nothing was shared"
    check_manager(manager)


def test_the_same_prompt_leaves_at_most_a_block_to_compute() -> None:
    core, _, _, events = make_hybrid_engine()
    for length in (1, 16, 17, 32, 100):
        answer(core, f"{length} first", tokens(length, length))
        answer(core, f"{length} again", tokens(length, length))
    assert num_cached(events.events) == [0, 0, 0, 0, 0, 16, 0, 16, 0, 96]


def test_siblings_continue_the_state_of_their_leader() -> None:
    core, _, executor, _ = make_hybrid_engine()
    prompt = tokens(1, 100)
    for name in "abc":
        core.add(make_request(name, prompt, 30, leader_id=None if name == "a" else "a"))
    assert run_to_end(core) == dict.fromkeys("abc", expected_tokens(prompt, 30))
    new = [new for output in executor.outputs for new in output.new_requests]
    assert [(each.request_id, each.num_computed_tokens) for each in new] == [("a", 0), ("b", 96), ("c", 96)]


def test_without_a_prefix_cache_nothing_is_shared_and_no_checkpoint_is_written() -> None:
    core, manager, executor, _ = make_hybrid_engine(enable_prefix_caching=False)
    prompt = tokens(1, 100)
    for name in "abc":
        core.add(make_request(name, prompt, 30, leader_id=None if name == "a" else "a"))
    assert run_to_end(core) == dict.fromkeys("abc", expected_tokens(prompt, 30))
    assert all(new.num_computed_tokens == 0 for output in executor.outputs for new in output.new_requests)
    assert not any(output.checkpoints for output in executor.outputs)
    assert isinstance(manager.prefixes, NoPrefixes)


def test_a_preempted_request_continues_at_its_last_checkpoint() -> None:
    core, manager, executor, _ = make_hybrid_engine(num_blocks=21, max_model_len=320, max_num_seqs=2)
    prompts = {"a": tokens(1, 100), "b": tokens(2, 100)}
    core.add(make_request("a", prompts["a"], 70))
    core.add(make_request("b", prompts["b"], 100))
    assert run_to_end(core) == {"a": expected_tokens(prompts["a"], 70), "b": expected_tokens(prompts["b"], 100)}
    admitted = [new for output in executor.outputs for new in output.new_requests if new.request_id == "b"]
    assert len(admitted) == 2, "the pool holds both prompts, and not both outputs"
    assert (len(admitted[1].token_ids), admitted[1].num_computed_tokens) == (161, 160)
    check_manager(manager)


def test_a_checkpoint_is_lost_with_its_block() -> None:
    core, manager, _, events = make_hybrid_engine(num_blocks=30, max_model_len=480)
    answer(core, "a", tokens(1, 200))
    assert manager.prefixes.checkpoints.num_used
    answer(core, "b", tokens(2, 470))
    check_manager(manager)
    assert all(manager.pool.find(key) is not None for key in manager.prefixes.checkpoints._index)
    answer(core, "c", tokens(1, 200))
    assert num_cached(events.events) == [0, 0, 0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_draft_tokens_leave_the_checkpoints_of_plain_decoding(acceptance: float, seed: int) -> None:
    kept = []
    for propose in (None, PartlyRightProposals(seed, acceptance)):
        core, manager, executor, _ = make_hybrid_engine(interval=64, propose=propose)
        answer(core, "a", tokens(1, 40), max_tokens=150)
        assert (len(executor.outputs) < 100) == (propose is not None and acceptance > 0)
        assert manager.prefixes.checkpoints.num_used == len(manager.prefixes.checkpoints._index)
        kept.append(set(manager.prefixes.checkpoints._index))
        known = [*tokens(1, 40), *expected_tokens(tokens(1, 40), 150)]
        states = {prefix_key(known[:length]) for length in range(0, len(known), BLOCK_SIZE)}
        assert {executor.checkpoints[each.slot] for each in manager.prefixes.checkpoints._index.values()} <= states
    assert kept[0] == kept[1]


@pytest.mark.parametrize("num_right", range(4))
def test_a_checkpoint_among_draft_tokens_is_kept_if_those_before_it_are_accepted(num_right: int) -> None:
    """The step with three draft tokens computes positions 12 to 15, and the next block begins at 16."""
    prompt = tokens(1, 12)
    known = [*prompt, *expected_tokens(prompt, 30)]

    def propose(request: Request, max_tokens: int) -> Proposal | None:
        start = len(request.token_ids)
        if start != 13:
            return None
        right = known[start : start + max_tokens]
        return Proposal([t if index < num_right else t + 1 for index, t in enumerate(right)], 8)

    core, manager, executor, _ = make_hybrid_engine(propose=propose)
    core.add(request := make_request("a", prompt, 30))
    core.step()
    core.step()
    assert executor.outputs[-1].num_drafts("a") == 3, "as many as the block of the request has slots for"
    assert [position for position, _ in executor.outputs[-1].checkpoints["a"]] == [16]
    manager.begin_step()
    assert manager.prefixes.checkpoints.num_used == (num_right >= 3)
    assert not manager.prefixes._unregistered
    run_to_end(core)
    assert request.token_ids == known
    for entry in manager.prefixes.checkpoints._index.values():
        assert executor.checkpoints[entry.slot] in {prefix_key(known[:length]) for length in range(0, 42, BLOCK_SIZE)}


def test_salts_do_not_share_checkpoints() -> None:
    core, _, _, events = make_hybrid_engine()
    for number, salt in enumerate(("a", "b", "a")):
        core.add(make_request(str(number), tokens(1, 100), 4, cache_salt=salt))
        run_to_end(core)
    assert num_cached(events.events) == [0, 0, 96]


@given(
    arrivals=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=24), st.integers(1, 20), st.integers(0, 9)),
        min_size=1,
        max_size=10,
    ),
    num_blocks=st.integers(11, 30),
    num_slots=st.integers(0, 8),
    interval=st.integers(1, 3),
    steps_ahead=st.integers(0, 2),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(5, 20),
    acceptance=st.sampled_from([None, 0.0, 0.6, 1.0]),
    num_swap_blocks=st.sampled_from([0, 4, 60]),
)
@settings(max_examples=100, deadline=None)
def test_slots_are_in_one_use_and_hits_have_their_state(
    arrivals: list[tuple[list[int], int, int]],
    num_blocks: int,
    num_slots: int,
    interval: int,
    steps_ahead: int,
    max_num_seqs: int,
    budget: int,
    acceptance: float | None,
    num_swap_blocks: int,
) -> None:
    """Requests with equal beginnings arrive, are preempted and aborted; an action is the number of a request to abort
    or of steps to compute."""
    core, manager, _, _ = make_engine(
        num_blocks=num_blocks,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        steps_ahead=steps_ahead,
        checkpoints=CheckpointPlan(num_slots, 4 * interval),
        num_swap_blocks=num_swap_blocks,
        propose=None if acceptance is None else PartlyRightProposals(len(arrivals), acceptance),
    )
    answers: dict[str, list[int]] = {}
    aborted: set[str] = set()

    def step() -> None:
        collect(core.step(), answers)
        check_manager(manager)

    for number, (prompt, max_tokens, action) in enumerate(arrivals):
        core.add(make_request(str(number), prompt, max_tokens, leader_id=str(number - 1) if action == 9 else None))
        if action > 6 and core.abort(victim := str(number * 7 % (number + 1))):
            aborted.add(victim)
            check_manager(manager)
        for _ in range(action):
            step()
    while core.has_work:
        step()
    for number, (prompt, max_tokens, _) in enumerate(arrivals):
        assert str(number) in aborted or answers[str(number)] == expected_tokens(prompt, max_tokens)
    assert manager.num_free_blocks == num_blocks
    assert not manager.prefixes._states
    assert not manager.prefixes._swapped
    assert not manager.counts().num_swap_blocks
    assert manager.prefixes.checkpoints.num_used == len(manager.prefixes.checkpoints._index)


def test_a_swapped_request_continues_at_its_last_checkpoint_without_the_prefix_cache() -> None:
    """The blocks of the preempted request are evicted, and with them all other checkpoints of its tokens."""
    core, manager, executor, events = make_hybrid_engine(
        num_blocks=21, max_model_len=320, max_num_seqs=2, num_swap_blocks=40
    )
    prompts = {"a": tokens(1, 150), "b": tokens(2, 150)}
    for name, prompt in prompts.items():
        core.add(make_request(name, prompt, 40))
    assert run_to_end(core) == {name: expected_tokens(prompt, 40) for name, prompt in prompts.items()}
    steps = [event for event in events.events if isinstance(event, Step)]
    assert [event.swapped for event in steps if event.swapped] == [["b"]]
    again = [new for output in executor.outputs for new in output.new_requests][-1]
    assert (again.request_id, again.num_computed_tokens % BLOCK_SIZE) == ("b", 0)
    assert again.num_computed_tokens >= 144
    assert sum(event.num_recomputed for event in steps) < BLOCK_SIZE
    check_manager(manager)


def test_a_thousand_requests_leave_nothing_behind() -> None:
    """Shared prefixes, groups, aborts, preemptions and evictions, in a pool that is far too small."""
    rng = random.Random(5)
    core, manager, _, events = make_hybrid_engine(
        num_slots=10,
        interval=64,
        checks_slots=False,
        num_blocks=60,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=96,
    )
    assert isinstance(manager.prefixes, CheckpointedPrefixes)
    prefixes = [tokens(index, 120) for index in range(8)]
    answers: dict[str, list[int]] = {}
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for number in range(1000):
        prompt = rng.choice(prefixes)[: rng.randint(1, 120)] + [rng.randrange(9) for _ in range(rng.randint(0, 60))]
        prompts[str(number)] = prompt, rng.randint(1, 60)
        leader = str(number - 1) if number and prompts[str(number - 1)][0] == prompt else None
        core.add(make_request(str(number), *prompts[str(number)], leader_id=leader))
        if rng.random() < 0.1:
            aborted.add(victim := rng.choice(list(core.scheduler.unfinished)))
            core.abort(victim)
        while len(core.scheduler.unfinished) > 12:
            collect(core.step(), answers)
        if number % 50 == 0:
            check_manager(manager)
    while core.has_work:
        collect(core.step(), answers)
    for name, (prompt, max_tokens) in prompts.items():
        if name not in aborted:
            assert answers[name] == expected_tokens(prompt, max_tokens)
    log = [event for event in events.events if isinstance(event, Step)]
    assert sum(len(event.preempted) for event in log) > 10
    assert sum(event.evicted_checkpoints for event in log) > 100
    assert log[-1].num_checkpoints <= manager.prefixes.checkpoints.num_slots
    assert sum(count > 0 for count in num_cached(events.events)) > 100
    assert manager.num_free_blocks == manager.num_blocks
    assert not manager.prefixes._states
    assert not manager.prefixes._unregistered
    check_manager(manager)


def test_a_request_that_does_not_fit_is_rejected_as_before() -> None:
    core, _, _, _ = make_hybrid_engine(num_blocks=4, max_model_len=400)
    with pytest.raises(RequestError, match="can never fit"):
        core.add(make_request("a", tokens(1, 100)))
