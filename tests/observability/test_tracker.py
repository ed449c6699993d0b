"""For each wait reason, the spans that are derived from events add up exactly to the queue time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import KV_ARENAS, SCHEDULING_POLICIES
from chairlift.errors import RequestError
from chairlift.events import RequestArrived, Step
from chairlift.observability import tracker as tracker_module
from chairlift.observability.tracker import RequestTracker
from chairlift.request import WaitReason
from support.fakes import PartlyRightProposals
from support.tracked_engine import TrackedEngine, check_waits

LONG = [*range(1, 13)]


def seats() -> TrackedEngine:
    engine = TrackedEngine(max_num_seqs=1)
    for start in (1, 2, 3):
        engine.add([start, 5, 6], late=0.02)
    return engine


def memory() -> TrackedEngine:
    engine = TrackedEngine(num_blocks=8, block_size=2, enable_prefix_caching=False, kv="exact", arena="first-fit")
    for start in (1, 2, 3):
        engine.add([start, *LONG[:5]], 6)
    return engine


def sibling_prefill() -> TrackedEngine:
    engine = TrackedEngine(max_num_batched_tokens=8, max_num_seqs=4)
    leader = engine.add([*LONG, *LONG], 3)
    engine.add([*LONG, *LONG], 3, leader_id=leader)
    engine.add([*LONG, *LONG], 3, leader_id=leader)
    return engine


def preemption() -> TrackedEngine:
    engine = TrackedEngine(num_blocks=5, block_size=2, max_num_seqs=3, enable_prefix_caching=False)
    for start in (1, 2, 3):
        engine.add([start, 4], 7)
    return engine


def pending_token() -> TrackedEngine:
    engine = TrackedEngine(num_blocks=4, block_size=2, max_num_seqs=3, enable_prefix_caching=False, steps_ahead=2)
    for start in (1, 2, 3):
        engine.add([start], 5)
    return engine


def batch() -> TrackedEngine:
    engine = TrackedEngine(batching="static", static_batch_size=2)
    engine.add([1, 2], 5)
    engine.steps(2)
    engine.add([3, 4], 2)
    return engine


def fairness() -> TrackedEngine:
    engine = TrackedEngine(max_num_seqs=1, scheduling_policy="fair")
    for start in range(4):
        engine.add([start, 7], 5, tenant="greedy")
    engine.steps(1)
    engine.add([9], 2, tenant="modest")
    return engine


def token_budget() -> TrackedEngine:
    engine = TrackedEngine(max_num_batched_tokens=16, max_model_len=16, max_num_seqs=4, enable_chunked_prefill=False)
    for start in (1, 2, 3):
        engine.add([start, *LONG[:9]], 2)
    return engine


WAYS: dict[WaitReason, Callable[[], TrackedEngine]] = {
    WaitReason.SEATS: seats,
    WaitReason.MEMORY: memory,
    WaitReason.SIBLING_PREFILL: sibling_prefill,
    WaitReason.PENDING_TOKEN: pending_token,
    WaitReason.PREEMPTION: preemption,
    WaitReason.BATCH: batch,
    WaitReason.FAIRNESS: fairness,
    WaitReason.TOKEN_BUDGET: token_budget,
}


def test_there_is_a_load_for_every_wait_reason() -> None:
    assert set(WAYS) == set(WaitReason)


@pytest.mark.parametrize("reason", WAYS, ids=[reason.value for reason in WAYS])
def test_the_spans_of_a_wait_are_its_queue_time(reason: WaitReason) -> None:
    engine = WAYS[reason]()
    engine.to_end()
    assert check_waits(engine.tracker, engine.log)[reason.value] > 0


def shorten_timeline(patch: pytest.MonkeyPatch, max_steps: int, interval: int) -> None:
    patch.setattr(tracker_module, "MAX_TIMELINE_STEPS", max_steps)
    patch.setattr(tracker_module, "PRUNE_INTERVAL_STEPS", interval)


@pytest.mark.parametrize("reason", WAYS, ids=[reason.value for reason in WAYS])
def test_the_spans_of_a_wait_that_is_summed_up_are_its_queue_time(
    reason: WaitReason, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_timeline(monkeypatch, 2, 1)
    engine = WAYS[reason]()
    engine.to_end()
    assert check_waits(engine.tracker, engine.log)[reason.value] > 0


def test_the_timeline_of_a_request_that_waits_for_long_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TrackedEngine(max_num_seqs=1, scheduling_policy="priority")
    shorten_timeline(monkeypatch, 20, 8)
    engine.add([1, 2], 3)
    engine.steps(1)
    engine.add([1, 3], 3, priority=1)
    kept = []
    for number in range(30):
        engine.add([2, number], 4)
        engine.steps(4)
        kept += [len(engine.tracker.timeline._times), len(engine.tracker.timeline._intervals)]
    assert max(kept) <= 20 + 8 + 1
    engine.to_end()
    assert check_waits(engine.tracker, engine.log)["seats"] > 120


def seconds_by_reason(tracker: RequestTracker) -> dict[tuple[str, str], float]:
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for request in tracker.requests():
        for span in chain.from_iterable(tracker.spans(request)):
            seconds[request.request_id, span.reason] += span.end - span.start
    return seconds


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_spans_add_up_in_any_load(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shorten_timeline(patch, data.draw(st.sampled_from([1, 3, 10, 1000])), data.draw(st.integers(1, 3)))
        patch.setattr(tracker_module, "MAX_RUNS", data.draw(st.sampled_from([0, 1, 3, 1000])))
        engine = run_any_load(data)
    whole = RequestTracker()
    assert engine.tracker.started is not None
    for event in (engine.tracker.started, *engine.log.events):
        whole.emit(event)
    assert seconds_by_reason(engine.tracker) == pytest.approx(seconds_by_reason(whole))


def run_any_load(data: st.DataObject) -> TrackedEngine:
    options = data.draw(ENGINES)
    engine = TrackedEngine(**options)
    for _ in range(data.draw(st.integers(3, 30))):
        act(engine, data, forced=options["kv"] in ("pow2", "oracle"), priority=options["scheduling_policy"] != "fcfs")
        if not options["steps_ahead"]:
            check_block_ids(engine)
    engine.to_end()
    check_waits(engine.tracker, engine.log)
    assert not engine.tracker.holders()
    assert not engine.tracker.batch
    assert not engine.tracker.unfinished
    return engine


def check_block_ids(engine: TrackedEngine) -> None:
    """Check that the tracked blocks of running requests are those of their block tables."""
    for request_id, request in engine.core.scheduler.unfinished.items():
        tracked = engine.tracker.get(request_id)
        if tracked is not None and tracked.state == "running":
            assert sorted(tracked.block_ids) == sorted(chain.from_iterable(engine.manager.block_tables(request)))


ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 24),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(4, 12),
        "max_model_len": st.just(24),
        "scheduling_policy": st.sampled_from(SCHEDULING_POLICIES),
        "enable_prefix_caching": st.booleans(),
        "steps_ahead": st.integers(0, 2),
        "kv": st.sampled_from(["paged", "paged", "exact", "pow2", "oracle"]),
        "arena": st.sampled_from(KV_ARENAS),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
    }
)


def act(engine: TrackedEngine, data: st.DataObject, forced: bool, priority: bool) -> None:
    """Apply one random action to an engine."""
    what = data.draw(st.sampled_from(["arrive", "arrive", "siblings", "step", "step", "steps", "abort"]))
    unfinished = list(engine.core.scheduler.unfinished)
    if what == "abort" and unfinished:
        engine.core.abort(data.draw(st.sampled_from(unfinished)))
    elif what in ("step", "steps"):
        engine.steps(1 if what == "step" else 5)
    elif what in ("arrive", "siblings"):
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))
        max_tokens = data.draw(st.integers(1, 9))
        options = {
            "late": data.draw(st.sampled_from([0.0, 0.05])),
            "tenant": data.draw(st.sampled_from("ab")),
            "priority": data.draw(st.integers(0, 2)) if priority else 0,
            "output_len": max_tokens if forced else None,
        }
        try:
            leader = engine.add(prompt, max_tokens, **options)
            if what == "siblings":
                engine.add(prompt, max_tokens, leader_id=leader, **options)
        except RequestError:
            return


def test_lost_events_are_shown_as_unknown() -> None:
    engine = seats()
    engine.to_end()
    tracker = RequestTracker()
    assert engine.tracker.started is not None
    tracker.emit(engine.tracker.started)
    steps = [event for event in engine.log.events if isinstance(event, Step)]
    lost = {step.step for step in steps if 2 <= step.step <= 4}
    for event in engine.log.events:
        if not (isinstance(event, Step) and event.step in lost):
            tracker.emit(event)
    request = tracker.get("r3")
    assert request is not None
    (spans,) = tracker.spans(request)
    assert [(span.reason, span.num_steps) for span in spans if span.reason == "unknown"] == [("unknown", len(lost))]
    assert spans[-1].end - spans[0].start == request.queue_time


def test_requests_admitted_by_a_lost_step_are_running() -> None:
    engine = seats()
    engine.to_end()
    tracker = RequestTracker()
    assert engine.tracker.started is not None
    tracker.emit(engine.tracker.started)
    lost = next(e.step for e in engine.log.events if isinstance(e, Step) and "r3" in e.admitted)
    for event in engine.log.events:
        if isinstance(event, Step) and event.step == lost:
            continue
        tracker.emit(event)
        request = tracker.get("r3")
        if isinstance(event, Step) and event.step > lost and "r3" in event.request_ids:
            assert request is not None
            assert request.state != "waiting"
            assert request.request_id in {holder.arrived.request_id for holder in tracker.holders()} or request.finished
    assert tracker.counts() == {"waiting": 0, "running": 0}
    assert not tracker.holders()


def test_requests_are_tracked_through_a_restart() -> None:
    engine = seats()
    engine.steps(2)
    tracker, started = engine.tracker, engine.tracker.started
    assert started is not None
    arrived = next(e for e in engine.log.events if isinstance(e, RequestArrived) and e.request_id == "r3")
    tracker.emit(replace(started, time=9.0))
    lost = tracker.get("r1")
    assert lost is not None
    assert (lost.state, lost.end_time) == ("lost", 9.0)
    assert not tracker.holders()
    tracker.emit(replace(arrived, step=0))
    tracker.emit(step_of("r3", 0, 12.0))
    again = tracker.get("r3")
    assert again is not None
    (spans,) = tracker.spans(again)
    assert [(span.reason, span.start, span.end) for span in spans] == [("restart", arrived.time, 12.0)]
    assert (again.state, again.queue_time) == ("running", 12.0 - arrived.time)


def step_of(request_id: str, number: int, time: float) -> Step:
    return Step(time + 1, number, time, [request_id], [3], [0], [1], [request_id], [], [], 1, 0, 0, 0)


def test_ended_requests_are_removed_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module, "PRUNE_INTERVAL_STEPS", 256)
    engine = TrackedEngine(max_num_seqs=2)
    tracker = RequestTracker(max_finished=5)
    assert engine.tracker.started is not None
    tracker.emit(engine.tracker.started)
    for _ in range(200):
        engine.add([1, 2], 3)
        engine.add([1, 3], 2)
        engine.to_end()
    for event in engine.log.events:
        tracker.emit(event)
    assert len(list(tracker.requests())) == 5
    assert tracker.get("r1") is None
    assert len(tracker.timeline._times) <= 256
    assert sum(span.interval is not None for r in tracker.requests() for w in tracker.spans(r) for span in w) <= 10


def test_after_each_step_the_batch_holds_what_is_not_free() -> None:
    for kv in ("paged", "exact"):
        engine = TrackedEngine(
            num_blocks=9, block_size=2, enable_prefix_caching=False, kv=kv, arena="first-fit", max_num_seqs=3
        )
        for start in range(5):
            engine.add([start, 1, 2], 6)
        checked = 0
        while engine.core.has_work:
            engine.steps(1)
            checked += check_blocks(engine)
        assert checked > 5


def test_rejected_draft_tokens_are_not_computed_tokens() -> None:
    engine = TrackedEngine(block_size=8, max_num_seqs=3, propose=PartlyRightProposals(1, 0.6))
    for start in range(4):
        engine.add([start, 1, 2], 30)
    seen = 0
    while engine.core.has_work:
        engine.steps(1)
        for request in engine.core.scheduler.unfinished.values():
            tracked = engine.tracker.get(request.request_id)
            assert tracked is not None
            assert tracked.num_computed == request.num_computed_tokens
            assert tracked.num_output_tokens == request.num_output_tokens
            seen += 1
    assert seen > 20
    steps = [event for event in engine.log.events if isinstance(event, Step)]
    requests = list(engine.tracker.requests())
    assert sum(r.draft_tokens for r in requests) == sum(sum(step.num_draft) for step in steps) > 20
    assert 0 < sum(r.accepted_draft_tokens for r in requests) == sum(step.num_accepted for step in steps)


def check_blocks(engine: TrackedEngine) -> bool:
    """Check the blocks of the batch. Requests that ended in the last step held theirs when it was scheduled."""
    last = engine.tracker.last_step
    assert last is not None
    if last.finished:
        return False
    assert sum(holder.num_blocks for holder in engine.tracker.holders()) == engine.manager.num_blocks - last.free_blocks
    return True
