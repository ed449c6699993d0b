"""Every way of waiting, followed through events alone: the spans add up to the queue time, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import KV_ARENAS
from chairlift.errors import RequestError
from chairlift.request import WaitReason
from tracked_crowds import Crowd, check_waits

LONG = [*range(1, 13)]


def seats() -> Crowd:
    crowd = Crowd(max_num_seqs=1)
    for start in (1, 2, 3):
        crowd.add([start, 5, 6], late=0.02)
    return crowd


def memory() -> Crowd:
    crowd = Crowd(num_blocks=8, block_size=2, enable_prefix_caching=False, kv="exact", arena="first-fit")
    for start in (1, 2, 3):
        crowd.add([start, *LONG[:5]], 6)
    return crowd


def sibling_prefill() -> Crowd:
    crowd = Crowd(max_num_batched_tokens=8, max_num_seqs=4)
    leader = crowd.add([*LONG, *LONG], 3)
    crowd.add([*LONG, *LONG], 3, leader_id=leader)
    crowd.add([*LONG, *LONG], 3, leader_id=leader)
    return crowd


def preemption() -> Crowd:
    crowd = Crowd(num_blocks=5, block_size=2, max_num_seqs=3, enable_prefix_caching=False)
    for start in (1, 2, 3):
        crowd.add([start, 4], 7)
    return crowd


def pending_token() -> Crowd:
    crowd = Crowd(num_blocks=4, block_size=2, max_num_seqs=3, enable_prefix_caching=False, steps_ahead=2)
    for start in (1, 2, 3):
        crowd.add([start], 5)
    return crowd


def batch() -> Crowd:
    crowd = Crowd(batching="static", static_batch_size=2)
    crowd.add([1, 2], 5)
    crowd.steps(2)
    crowd.add([3, 4], 2)
    return crowd


def fairness() -> Crowd:
    crowd = Crowd(max_num_seqs=1, scheduling_policy="fair")
    for start in range(4):
        crowd.add([start, 7], 5, tenant="greedy")
    crowd.steps(1)
    crowd.add([9], 2, tenant="modest")
    return crowd


WAYS: dict[WaitReason, Callable[[], Crowd]] = {
    WaitReason.SEATS: seats,
    WaitReason.MEMORY: memory,
    WaitReason.SIBLING_PREFILL: sibling_prefill,
    WaitReason.PENDING_TOKEN: pending_token,
    WaitReason.PREEMPTION: preemption,
    WaitReason.BATCH: batch,
    WaitReason.FAIRNESS: fairness,
}


def test_there_is_a_crowd_for_every_reason() -> None:
    assert set(WAYS) == set(WaitReason)


@pytest.mark.parametrize("reason", WAYS, ids=[reason.value for reason in WAYS])
def test_the_spans_of_a_wait_are_its_queue_time(reason: WaitReason) -> None:
    crowd = WAYS[reason]()
    crowd.to_end()
    assert check_waits(crowd.tracker, crowd.log)[reason.value] > 0


@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_spans_add_up_in_any_crowd(data: st.DataObject) -> None:
    options = data.draw(ENGINES)
    crowd = Crowd(**options)
    for _ in range(data.draw(st.integers(3, 30))):
        act(crowd, data, forced=options["kv"] in ("pow2", "oracle"), priority=options["scheduling_policy"] != "fcfs")
    crowd.to_end()
    check_waits(crowd.tracker, crowd.log)
    assert not crowd.tracker.holders()
    assert not crowd.tracker._unfinished
    assert not crowd.tracker._leaving


ENGINES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 24),
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(4, 12),
        "max_model_len": st.just(24),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "fair"]),
        "enable_prefix_caching": st.booleans(),
        "steps_ahead": st.integers(0, 2),
        "kv": st.sampled_from(["paged", "paged", "exact", "pow2", "oracle"]),
        "arena": st.sampled_from(KV_ARENAS),
        "batching": st.sampled_from(["continuous", "continuous", "static"]),
    }
)


def act(crowd: Crowd, data: st.DataObject, forced: bool, priority: bool) -> None:
    """One thing that can happen to an engine."""
    what = data.draw(st.sampled_from(["arrive", "arrive", "siblings", "step", "step", "steps", "abort"]))
    unfinished = crowd.core.scheduler.unfinished_ids()
    if what == "abort" and unfinished:
        crowd.core.abort(data.draw(st.sampled_from(unfinished)))
    elif what in ("step", "steps"):
        crowd.steps(1 if what == "step" else 5)
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
            leader = crowd.add(prompt, max_tokens, **options)
            if what == "siblings":
                crowd.add(prompt, max_tokens, leader_id=leader, **options)
        except RequestError:
            return
