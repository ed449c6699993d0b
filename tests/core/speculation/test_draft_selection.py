"""Draft tokens: they change no other part of a step, leave no trace in memory, and are added only if they pay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.clock import VirtualClock
from chairlift.config import SchedulerConfig
from chairlift.core.engine_core import EngineCore
from chairlift.core.factory import make_scheduler
from chairlift.core.kv.kv_cache_manager import KVCacheManager
from chairlift.core.kv.kv_groups import FULL
from chairlift.core.kv.paged_kv_cache import PagedKVCacheManager
from chairlift.core.measuring.accounting import slot_usage
from chairlift.core.speculation.draft_selection import MAX_LAG, MAX_READ
from chairlift.core.speculation.prompt_lookup import Proposal
from chairlift.events import EventList, RequestFinished, Step
from chairlift.outputs import ModelRunnerOutput, SchedulerOutput
from chairlift.request import Request
from chairlift.speculative_config import SpeculativeConfig
from chairlift.step_time import RowTime
from support.fakes import (
    CheckingExecutor,
    PartlyRightProposals,
    Propose,
    expected_tokens,
    make_engine,
    make_request,
    run_to_end,
)
from support.kv_invariants import make_paged_manager

FREE_ROWS = RowTime({1: 1.0, 64: 1.0})
COSTLY_ROWS = RowTime({1: 1.0, 64: 64.0})


def always_right(request: Request, max_tokens: int) -> Proposal:
    return Proposal(expected_tokens(request.token_ids, max_tokens), 16)


def always_wrong(request: Request, max_tokens: int) -> Proposal:
    return Proposal([(t + 1) % 1000 for t in expected_tokens(request.token_ids, max_tokens)], 16)


def steps(events: EventList) -> list[Step]:
    return [event for event in events.events if isinstance(event, Step)]


def run(propose: Propose | None, row_time: RowTime | None = None, num_requests: int = 1) -> list[Step]:
    core, _, _, events = make_engine(propose=propose, row_time=row_time, block_size=8)
    for index in range(num_requests):
        core.add(make_request(f"r{index}", [index, 2, 3], 24))
    answers = run_to_end(core)
    assert answers == {f"r{index}": expected_tokens([index, 2, 3], 24) for index in range(num_requests)}
    return steps(events)


def test_accepted_drafts_save_steps() -> None:
    plain, speculative = run(None), run(always_right)
    assert len(plain) == 24
    assert len(speculative) < 8
    assert sum(map(sum, (step.num_new for step in speculative))) == 24
    assert all(step.num_rejected == [0] for step in speculative if step.num_draft)


def test_rejected_drafts_cost_no_step() -> None:
    speculative = run(always_wrong)
    assert len(speculative) == 24
    assert sum(step.num_accepted for step in speculative) == 0
    assert sum(map(sum, (step.num_draft for step in speculative))) > 24


def test_drafts_that_do_not_pay_are_not_verified() -> None:
    assert all(not step.num_draft for step in run(always_right, COSTLY_ROWS))
    wrong = run(always_wrong, FREE_ROWS)
    assert [bool(step.num_draft) for step in wrong].index(True) < 3
    linear = run(always_wrong, RowTime({1: 1.0, 64: 10.0}))
    assert not any(step.num_draft for step in linear[len(linear) // 2 :]), "the estimate falls below the break-even"


def test_many_requests_stop_speculation() -> None:
    row_time = RowTime({1: 1.0, 4: 1.1, 8: 2.2, 64: 17.6})
    assert any(step.num_draft for step in run(always_right, row_time))
    crowd = run(always_right, row_time, num_requests=8)
    full = [step for step in crowd if len(step.request_ids) == 8]
    assert full
    assert not any(step.num_draft for step in full)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_draft_never_exceeds_the_answer_or_the_slots(batching: str) -> None:
    core, manager, _, events = make_engine(propose=always_right, block_size=4, batching=batching)
    core.add(make_request("a", [1, 2, 3], 9))
    core.add(make_request("b", [4], 2))
    while core.has_work:
        core.step()
        for request in core.scheduler.unfinished.values():
            assert len(manager.block_tables(request)[0]) == -(-request.num_computed_tokens // 4)
    ends = {e.request_id: e.num_output_tokens for e in events.events if isinstance(e, RequestFinished)}
    assert ends == {"a": 9, "b": 2}


def test_a_proposal_ends_before_a_stop_token() -> None:
    answer = expected_tokens([1, 2, 3], 9)
    core, _, executor, _ = make_engine(propose=always_right, block_size=16)
    core.add(make_request("a", [1, 2, 3], 9, stop_token_ids=answer[4:5]))
    assert run_to_end(core) == {"a": answer[:5]}
    drafted = [token for output in executor.outputs for token in output.draft_token_ids.get("a", [])]
    assert drafted
    assert answer[4] not in drafted


def test_drafts_use_only_the_rest_of_the_token_budget() -> None:
    def planned(propose: Propose | None) -> list[tuple[dict[str, int], list[str]]]:
        core, _, executor, _ = make_engine(propose=propose, max_num_batched_tokens=12, max_num_seqs=4, block_size=16)
        core.add(make_request("a", [1, 2], 30))
        for _ in range(3):
            core.step()
        num_before = len(executor.outputs)
        core.add(make_request("b", list(range(25)), 4))
        for _ in range(3):
            core.step()
        found = []
        for output in executor.outputs[num_before:]:
            drafts = {rid: len(tokens) for rid, tokens in output.draft_token_ids.items()}
            assert sum(output.num_scheduled_tokens.values()) <= 12
            known = {rid: count - drafts.get(rid, 0) for rid, count in output.num_scheduled_tokens.items()}
            found.append((known, [new.request_id for new in output.new_requests]))
        return found

    assert planned(always_wrong) == planned(None)


def _advance(core: EngineCore, request: Request, num_tokens: int) -> None:
    while len(request.token_ids) < num_tokens and request.finish_reason is None:
        core.step()


def _held_slots(manager: KVCacheManager, request: Request) -> tuple[int, int]:
    return manager.num_held_slots(request), manager.num_released_slots(request)


def _memory(manager: PagedKVCacheManager, running: Sequence[Request]) -> tuple[object, ...]:
    pool = manager.pool
    tables = [manager.block_tables(request) for request in running]
    return tables, list(pool.order), pool._hashes, pool._references, slot_usage(running, manager, None)


@given(
    seed=st.integers(0, 1000),
    acceptance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=10), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 2, 4, 8]),
    windows=st.sampled_from([FULL, (3,), (None, 5)]),
    kv=st.sampled_from(["paged", "exact"]),
)
@settings(max_examples=60, deadline=None)
def test_any_proposal_leaves_the_state_of_plain_decoding(
    seed: int, acceptance: float, prompts: list[list[int]], block_size: int, windows: tuple[int | None, ...], kv: str
) -> None:
    """Requests run one after the other; after each step the pool, its index and the accounting are those of plain
    decoding with as many tokens."""
    windows = windows if kv == "paged" else FULL
    parts = [
        make_engine(block_size=block_size, windows=windows, kv=kv, propose=propose, max_num_batched_tokens=16)
        for propose in (PartlyRightProposals(seed, acceptance), None)
    ]
    (core, manager, _, _), (plain, plain_manager, _, _) = parts
    for index, prompt in enumerate(prompts):
        request, plain_request = (make_request(f"r{index}", prompt, 14) for _ in range(2))
        core.add(request)
        plain.add(plain_request)
        while request.finish_reason is None:
            core.step()
            _advance(plain, plain_request, len(request.token_ids))
            assert request.token_ids == plain_request.token_ids
            for name in ("num_tokens", "num_computed_tokens", "num_slots"):
                assert getattr(request, name) == getattr(plain_request, name), name
            assert _held_slots(manager, request) == _held_slots(plain_manager, plain_request)
            if kv == "paged" and request.finish_reason is None:
                assert _memory(manager, [request]) == _memory(plain_manager, [plain_request])
    assert manager.num_free_blocks == plain_manager.num_free_blocks == manager.num_blocks


def test_a_step_with_drafts_waits_for_the_results_before_it() -> None:
    core, _, executor, _ = make_engine(propose=always_right, steps_ahead=2)
    assert isinstance(executor, CheckingExecutor)
    core.add(make_request("a", [1, 2, 3], 20))
    assert run_to_end(core) == {"a": expected_tokens([1, 2, 3], 20)}
    assert any(output.draft_token_ids for output in executor.outputs)


MODEL = SpeculativeConfig(model="a smaller model", num_speculative_tokens=4)


class DraftModelExecutor(CheckingExecutor):
    """Proposes tokens of which a part is right, and checks that the draft model has read the tokens before them."""

    def __init__(self, *args: int, probability: float) -> None:
        super().__init__(*args)
        self.read: dict[str, int] = {}
        self.random = random.Random(3)
        self.probability = probability

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for new in output.new_requests:
            self.read[new.request_id] = 0
        for request_id, count in output.num_draft_reads.items():
            self.read[request_id] += count
            assert self.read[request_id] < len(self.tokens[request_id])
        drafts = {}
        for request_id, count in output.num_draft_tokens.items():
            tokens = self.tokens[request_id]
            assert 1 <= len(tokens) - min(self.read[request_id], self.computed[request_id]) <= MAX_LAG
            right = expected_tokens(tokens, count)
            drafts[request_id] = [t if self.random.random() < self.probability else t + 1 for t in right]
            self.read[request_id] = len(tokens) + count - 1
        return super().submit(replace(output, draft_token_ids=drafts))


@pytest.mark.parametrize(("probability", "is_worth_it"), [(0.9, True), (0.05, False)])
def test_a_draft_model_proposes_while_it_pays(probability: float, is_worth_it: bool) -> None:
    config = SchedulerConfig(
        512,
        4,
        200,
        speculative_config=MODEL,
        row_time=RowTime({1: 1.0, 64: 4.0}),
        draft_row_time=RowTime({1: 0.2, 64: 0.8}),
    )
    manager = make_paged_manager(64, 16)
    executor = DraftModelExecutor(16, 64, 200, 4, probability=probability)
    events = EventList()
    core = EngineCore(make_scheduler(config, manager, events), executor, VirtualClock())
    prompt = [7] * 200
    core.add(make_request("a", prompt, 150))
    core.add(make_request("b", [5], 100))
    assert run_to_end(core) == {"a": expected_tokens(prompt, 150), "b": expected_tokens([5], 100)}
    assert manager.num_free_blocks == 64
    reads = [output.num_draft_reads["a"] for output in executor.outputs if "a" in output.num_draft_reads]
    assert reads[:2] == [MAX_READ, 201 - MAX_READ - 1], "the last prompt token is computed alone"
    late = steps(events)[-60:]
    share = sum(bool(step.num_draft) for step in late) / len(late)
    assert share > 0.7 if is_worth_it else share < 0.2
    if is_worth_it:
        assert len(executor.outputs) < 110


class PredictorExecutor(CheckingExecutor):
    """Proposes right tokens, and checks that it has computed the requests in an earlier step."""

    def submit(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert not output.num_draft_reads
        assert not output.num_draft_tokens.keys() & {new.request_id for new in output.new_requests}
        drafts = {rid: expected_tokens(self.tokens[rid], count) for rid, count in output.num_draft_tokens.items()}
        return super().submit(replace(output, draft_token_ids=drafts))


def test_a_predictor_proposes_for_requests_that_have_computed_a_step() -> None:
    """Preempted requests and prompts of one token compute their last token in the step in which they are admitted."""
    config = SchedulerConfig(200, 4, 64, speculative_config=SpeculativeConfig(method="mtp"))
    events, prompts = EventList(), [[7] * 40, [5], [7] * 17, [3]]
    core = EngineCore(
        make_scheduler(config, make_paged_manager(9, 16), events), PredictorExecutor(16, 9, 64, 4), VirtualClock()
    )
    for number, prompt in enumerate(prompts):
        core.add(make_request(str(number), prompt, 40))
    assert run_to_end(core) == {str(number): expected_tokens(prompt, 40) for number, prompt in enumerate(prompts)}
    assert any(step.preempted for step in steps(events))
    assert sum(step.num_accepted for step in steps(events)) > 20
