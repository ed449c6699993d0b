"""Runs the scheduler with each change of an explanation, and compares whether the request is admitted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.kv.state_checkpoints import CheckpointPlan
from chairlift.engine.explanation.explain import Viewer
from chairlift.engine.explanation.explained_span import ExplainedSpan, describe_preemption, describe_span
from chairlift.errors import ChairliftError
from chairlift.events import Step
from chairlift.observability.step_cost import MIN_STEPS
from chairlift.request import WaitReason
from chairlift.slo import SLO
from support.explained import explain
from support.tracked_engine import TrackedEngine

Prompts = list[tuple[int, int]]
"""(prompt tokens, max_tokens) of requests that come at once."""


def first_step(requests: Prompts, **options: Any) -> TrackedEngine:
    engine = TrackedEngine(**options)
    for length, max_tokens in requests:
        engine.add([engine.count] * length, max_tokens)
    engine.steps(1)
    return engine


def admitted(engine: TrackedEngine) -> list[str]:
    step = next(event for event in engine.log.events if isinstance(event, Step))
    return step.admitted


REQUESTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 10)), min_size=2, max_size=6)
ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 16),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 6),
        "max_model_len": st.just(24),
        "max_num_batched_tokens": st.just(100),
        "enable_prefix_caching": st.just(False),
        "kv": st.sampled_from(["paged", "exact", "max"]),
        "arena": st.sampled_from(["buddy", "first-fit"]),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
    }
)


@given(requests=REQUESTS, options=ENGINES)
@settings(max_examples=300, deadline=None)
def test_changes_that_would_admit_do_admit(requests: Prompts, options: dict[str, Any]) -> None:
    try:
        engine = first_step(requests, **options)
    except ChairliftError:
        return
    waiting = next((r for r in engine.tracker.waiting()), None)
    if waiting is None or engine.tracker.last_step is None:
        return
    index = int(waiting.request_id[1:]) - 1
    for way in explain(engine, waiting.request_id).would_admit:
        changes = dict(way.changes)
        changed = requests[: index + 1]
        if (max_tokens := changes.pop("max_tokens", None)) is not None:
            changed = [*changed[:-1], (changed[-1][0], int(max_tokens))]
        assert admits(changed, options, changes, waiting.request_id) is way.admits, way
        if way.admits and "num_kv_blocks" in changes and options["kv"] == "paged":
            changes["num_kv_blocks"] = int(changes["num_kv_blocks"]) - 1
            assert not admits(changed, options, changes, waiting.request_id), "the smallest pool"
        if way.admits and max_tokens is not None:
            longer = [*changed[:-1], (changed[-1][0], int(max_tokens) + 1)]
            assert not admits(longer, options, changes, waiting.request_id), "the largest max_tokens"


def admits(requests: Prompts, options: dict[str, Any], changes: dict[str, Any], request_id: str) -> bool:
    changed = {**options, "num_blocks": changes.get("num_kv_blocks", options["num_blocks"])}
    try:
        return request_id in admitted(first_step(requests, **changed))
    except ChairliftError:
        return False


def test_without_enough_steps_there_is_no_estimate() -> None:
    engine = first_step([(4, 20), (4, 12)], max_num_seqs=1)
    early = explain(engine, "r2")
    assert (early.position, early.expected_wait) == (0, None)
    seats = early.waits[0].spans[-1]
    assert (seats.reason, seats.estimate) == (WaitReason.SEATS, None)
    assert seats.text.endswith("; estimated wait: unknown")
    engine.steps(MIN_STEPS)
    later = explain(engine, "r2")
    assert later.expected_wait is not None
    assert not later.waits[0].spans[-1].text.endswith("; estimated wait: unknown")


def test_a_request_that_arrives_at_an_idle_engine_starts_in_the_next_step() -> None:
    engine = first_step([(4, 12)] * 3, max_num_seqs=3, num_blocks=30)
    engine.to_end()
    last = engine.tracker.last_step
    assert last is not None
    assert last.num_running == 3, "the counts of the last step are those before its requests ended"
    explanation = explain(engine, engine.add([9, 9], 2))
    assert explanation.position == 0
    assert explanation.expected_wait == engine.tracker.cost.seconds(0)


def test_the_expected_wait_is_close_to_the_real_wait() -> None:
    engine = first_step([(4, 20), (4, 12), (4, 9)], max_num_seqs=2, max_num_batched_tokens=16)
    engine.steps(4)
    engine.add([5], 3)
    engine.steps(6)
    explained = explain(engine, "r3")
    assert (explained.state, explained.position) == ("waiting", 0)
    last = explain(engine, "r4")
    assert last.position == 1
    assert explained.expected_wait is not None
    assert last.expected_wait is not None
    now = engine.clock.now()
    engine.to_end()
    for request_id, said in (("r3", explained.expected_wait), ("r4", last.expected_wait)):
        request = engine.tracker.get(request_id)
        assert request is not None
        assert request.first_scheduled is not None
        assert said == pytest.approx(request.first_scheduled - now, rel=0.4, abs=0.2)


def test_contention_costs_the_time_of_other_tokens() -> None:
    """Steps take 0.1 s and 0.01 s per token (see `TimedExecutor`), and their results 3 ms."""
    engine = first_step([(10, 30), (20, 8), (5, 4)])
    engine.to_end()
    cost = explain(engine, "r1").contention
    others = 20 + 7 + 5 + 3
    assert cost.shared_steps_time == pytest.approx(others * 0.01, rel=0.05)
    assert (cost.num_preemptions, cost.recompute_time) == (0, 0)
    alone = first_step([(10, 30)])
    alone.to_end()
    assert explain(alone, "r1").contention.shared_steps_time == pytest.approx(0, abs=1e-6)


def test_preemptions_are_costed() -> None:
    engine = first_step([(2, 7)] * 3, num_blocks=5, block_size=2, enable_prefix_caching=False)
    engine.to_end()
    (victim,) = (r for r in engine.tracker.requests() if r.num_preemptions == 1)
    explained = explain(engine, victim.request_id)
    assert [wait.cause for wait in explained.waits] == ["arrival", "preemption"]
    assert victim.finished is not None
    assert explained.contention.recomputed_tokens == victim.finished.num_recomputed_tokens > 0
    assert explained.contention.recompute_time == pytest.approx(0.01 * explained.contention.recomputed_tokens, rel=0.05)
    assert explained.contention.preempted_time == explained.waits[1].seconds > 0


def displaced_engine(**options: Any) -> TrackedEngine:
    """r1 has most work left, so r2 waits behind r3, and r3 takes the seat of r1."""
    engine = TrackedEngine(max_num_seqs=1, scheduling_policy="srpt", length_predictor="max_tokens", **options)
    engine.add([1, 2], 30, tenant="rich", slo=SLO(ttft_ms=9e6, tpot_ms=1))
    engine.steps(3)
    engine.add([3] * 5, 28, tenant="poor")
    engine.add([4], 3, tenant="rich")
    engine.steps(1)
    return engine


def test_the_order_of_the_policy_is_explained() -> None:
    engine = displaced_engine()
    waiting = [request.request_id for request in engine.tracker.waiting()]
    assert waiting == ["r1", "r2"]
    assert [explain(engine, name).position for name in waiting] == [0, 1], "r1 has 27 tokens left"
    first, second = explain(engine, "r1").waits
    assert (first.text, second.cause) == (None, "preemption")
    assert second.text == "preempted: its seat was given to r3, which has less work left than it had"
    text = explain(engine, "r2").waits[0].spans[-1].text
    assert text.startswith("behind r1 at the head of the queue, which has the least work left: the only seat is taken")


def test_levels_of_the_queue_are_explained() -> None:
    text = "preempted: its seat was given to r3, which is at least two levels above it"
    assert describe_preemption("r3", "mlfq") == text


def test_a_lost_seat_is_no_shortage_of_memory() -> None:
    engine = displaced_engine(pacing_tokens_per_second=1.0)
    assert [wait.text for wait in explain(engine, "r1").waits][1:] == [
        "preempted: its seat was given to r3, which has less work left than it had, or because it was ahead of its "
        "reader, or had the seat of a paused stream"
    ]
    for start in range(12):
        engine.add([start], 4)
    engine.to_end()
    assert missed(engine, "r1") == ("tpot", "displacement")


def test_the_request_that_took_a_seat_is_hidden_from_other_tenants() -> None:
    engine = displaced_engine()
    text = explain(engine, "r1", Viewer("poor", is_admin=False)).waits[1].text
    assert text is not None
    assert "given to other-" in text


def test_a_preemption_for_lack_of_memory_is_explained() -> None:
    engine = first_step([(2, 7)] * 3, num_blocks=5, block_size=2, enable_prefix_caching=False)
    engine.to_end()
    (victim,) = (r for r in engine.tracker.requests() if r.num_preemptions == 1)
    text = explain(engine, victim.request_id).waits[1].text
    assert text == "preempted for lack of memory, because it was the last running request in the order of the queue"


def test_other_tenants_are_shown_as_opaque_id_and_size() -> None:
    engine = TrackedEngine(max_num_seqs=1)
    engine.add([1, 2, 3], 9, tenant="rich")
    engine.add([4, 5], 2, tenant="poor")
    engine.to_end()
    spans = explain(engine, "r2", Viewer("poor", is_admin=False)).waits[0].spans
    (seats,) = (span for span in spans if span.reason == WaitReason.SEATS)
    assert seats.largest_holders[0].id.startswith("other-")
    assert seats.largest_holders[0].num_blocks == 1
    assert "r1" not in seats.text
    assert explain(engine, "r2").waits[0].spans[-1].largest_holders[0].id == "r1"


def test_the_text_of_a_span_has_its_numbers() -> None:
    engine = TrackedEngine(num_blocks=8, block_size=2, enable_prefix_caching=False)
    engine.add([1] * 11, 5)
    engine.add([2] * 5, 3)
    engine.to_end()
    (memory,) = (span for span in explain(engine, "r2").waits[0].spans if span.reason == WaitReason.MEMORY)
    assert memory.text.startswith("needs 3 blocks, 2 are free; running: r1 (6 blocks); estimated wait: ")


def test_a_hit_has_the_reason_why_it_ends() -> None:
    engine = TrackedEngine(
        num_blocks=40, block_size=4, max_num_seqs=1, max_model_len=64, checkpoints=CheckpointPlan(16, 12)
    )
    prompts = [1] * 30, [1] * 22 + [2] * 8, [1] * 10 + [3] * 8, [1] * 30
    names = [engine.add(prompt, 2) for prompt in prompts]
    engine.steps(30)
    assert [explain(engine, name).prefix for name in names] == [
        "0 of 30 prompt tokens were cached: the rest is new",
        "12 of 30 prompt tokens were cached: K and V of 20 were, but their last checkpoint of recurrent state is at 12",
        "0 of 18 prompt tokens were cached: K and V of 8 were, but none of their states is kept",
        "28 of 30 prompt tokens were cached",
    ]


def test_a_miss_has_its_reason_and_names_requests_to_an_admin_only() -> None:
    engine = TrackedEngine(num_blocks=32, block_size=4, max_num_seqs=1)
    text = list(range(100, 140))
    first = engine.add([1, *text], 2, tenant="a", cache_salt="1:a:")
    changed = engine.add([2, *text], 2, tenant="a", cache_salt="1:a:")
    other = engine.add([1, *text], 2, tenant="b", cache_salt="1:b:")
    big = engine.add([*range(500, 600)], 2, tenant="b", cache_salt="1:b:")
    again = engine.add([1, *text], 2, tenant="a", cache_salt="1:a:")
    engine.to_end()

    def prefix(name: str, viewer: Viewer) -> str:
        return (explain(engine, name, viewer).prefix or "").partition(": ")[2]

    admin = [prefix(name, Viewer()) for name in (first, changed, other, again)]
    assert admin[0] == "the rest is new"
    assert admin[1].startswith(f"token 0 differs from the prompt of {first}, which has about 16 of the tokens after")
    assert admin[2] == "the rest was computed for another cache_salt or API key"
    assert re.fullmatch(rf"the rest was evicted by {big} after \d\.\d s without use", admin[3])
    a, b = (Viewer(tenant, is_admin=False) for tenant in "ab")
    assert prefix(changed, a).startswith("token 0 differs from an earlier prompt, which has about 16 of the tokens")
    assert prefix(other, b) == "the rest is new"
    assert prefix(again, a) == admin[3].replace(f" by {big}", "")


def missed(engine: TrackedEngine, request_id: str) -> tuple[str | None, str | None]:
    """The missed objective of a request and its largest cause."""
    slo = explain(engine, request_id).slo
    assert slo is not None
    return slo.missed, slo.cause


def test_a_missed_slo_names_the_largest_cause() -> None:
    engine = TrackedEngine(max_num_seqs=1, num_blocks=16)
    engine.add([1, 2], 20)
    last = engine.add([3, 4], 2, slo=SLO(ttft_ms=1000))
    engine.steps(2)
    slo = explain(engine, last).slo
    assert slo is not None
    assert slo.is_met is None
    assert slo.text == "its SLO can still be met"
    engine.to_end()
    assert missed(engine, last) == ("ttft", "seats")
    slo = explain(engine, last).slo
    assert slo is not None
    assert slo.is_met is False
    assert re.fullmatch(r"TTFT 2.\d* s exceeds its SLO of 1000 ms, mostly because other requests .*: 2.\d* s", slo.text)


def test_a_prompt_in_chunks_beside_others_misses_its_slo_by_shared_steps() -> None:
    engine = TrackedEngine(max_num_batched_tokens=32, enable_prefix_caching=False)
    for _ in range(MIN_STEPS):  # steps of other sizes, which determine the cost of a token
        engine.add([9], 2)
        engine.steps(1)
    engine.to_end()
    engine.add(list(range(200)), 2)
    last = engine.add(list(range(20)), 2, slo=SLO(ttft_ms=1000))
    engine.to_end()
    assert missed(engine, last) == ("ttft", "shared_steps")
    assert engine.tracker.get(last).met_slo is False  # type: ignore[union-attr]


def test_preemption_and_own_tokens_are_causes_of_a_missed_tpot() -> None:
    engine = TrackedEngine(num_blocks=5, block_size=2, max_num_seqs=3, enable_prefix_caching=False)
    for start in (1, 2, 3):
        last = engine.add([start, 4], 7, slo=SLO(ttft_ms=9e6, tpot_ms=150))
    engine.to_end()
    assert missed(engine, last) == ("tpot", "preemption")
    alone = engine.add([9, 9], 7, slo=SLO(tpot_ms=1))
    engine.to_end()
    assert missed(engine, alone) == ("tpot", "own_tokens")


def test_a_met_slo_and_a_request_without_one() -> None:
    engine = TrackedEngine()
    met, without = engine.add([1], 3, slo=SLO(9e6, 9e6)), engine.add([2], 3)
    aborted = engine.add([3], 3, slo=SLO(1, 1))
    engine.core.abort(aborted)
    engine.to_end()
    slo = explain(engine, met).slo
    assert slo is not None
    assert (slo.is_met, slo.missed, slo.text) == (True, None, "its SLO is met")
    assert explain(engine, without).slo is None
    assert engine.tracker.get(aborted).met_slo is None  # type: ignore[union-attr]


def test_an_abort_before_the_first_token_is_no_missed_slo() -> None:
    engine = TrackedEngine(max_num_seqs=1)
    engine.add([1], 20)
    aborted = engine.add([2], 3, slo=SLO(ttft_ms=100))
    engine.steps(5)
    running = explain(engine, aborted).slo
    engine.core.abort(aborted)
    engine.to_end()
    ended = explain(engine, aborted).slo
    assert running is not None
    assert ended is not None
    assert (running.is_met, ended.is_met, ended.missed) == (False, None, "ttft")


def test_beams_that_lack_seats_wait_beside_free_ones() -> None:
    span = ExplainedSpan("seats", "", 0.0, 1.0, 5, is_head=True, num_running=8)
    assert describe_span(span, "fcfs", 32).startswith("its beams need more seats than are free: 8 of 32 are taken")
    assert describe_span(span, "fcfs", 8).startswith("all 8 seats are taken")
