"""Kinds of slots with true lengths against the block tables of the engine, time bins and mean shares of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from benchmarks.memory_picture import means, time_edges
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import GeneratedRun, Holder, engine_started, recorded_runs, started_of, steps_of

from chairlift.events import SLOT_KINDS, Event, RequestArrived, RequestFinished, Step
from chairlift.lab.report.recorded_run import Floats, RecordedRun, recorded_run, steps_with_true_kinds, trace_events
from support.fakes import make_engine, make_request


def reserved_slots(holders: dict[str, Holder], written: dict[str, int], block_size: int) -> int:
    """Slots that are held and will be written, counted one by one."""
    return sum(
        holder.num_written <= slot < written[name]
        for name, holder in holders.items()
        if not holder.has_ended
        for table in holder.tables
        for slot in range(len(table) * block_size)
    )


def slots(step: Step) -> tuple[int, ...]:
    return tuple(getattr(step, kind) for kind in SLOT_KINDS)


def true_slots(events: list[Event]) -> list[tuple[int, ...]]:
    return [slots(step) for step in steps_with_true_kinds(trace_events(events))]


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_true_kinds_against_slots_that_were_written_in_the_end(run: GeneratedRun) -> None:
    steps, started = steps_of(run), started_of(run)
    true_steps = steps_with_true_kinds(trace_events(run.events))
    for step, kinds, holders in zip(steps, true_steps, run.holders, strict=True):
        assert sum(slots(kinds)) == started.num_blocks * started.block_size
        assert kinds.reserved == reserved_slots(holders, run.written, started.block_size)
        assert kinds.reserved + kinds.internal == step.reserved + step.internal
        assert (kinds.token_states, kinds.external, kinds.free) == (step.token_states, step.external, step.free)
        assert 0 <= kinds.reserved <= step.reserved


@settings(max_examples=60, deadline=None)
@given(recorded_runs(forced=True))
def test_true_kinds_are_the_live_ones_where_max_tokens_is_the_length(run: GeneratedRun) -> None:
    steps = steps_of(run)
    assert steps_with_true_kinds(trace_events(run.events)) == steps


def test_an_unfinished_request_counts_with_its_max_tokens() -> None:
    core, _, _, log = make_engine(kv="exact", num_blocks=8)
    log.events.append(engine_started(num_blocks=8, kv="exact", kv_arena="buddy"))
    core.add(make_request("a", [1, 2, 3], 9))
    core.step()
    assert true_slots(log.events) == [(3, 8, 1, 4, 16)]


@st.composite
def intervals(draw: st.DrawFn) -> tuple[Floats, Floats, Floats]:
    """Starts, ends and amounts of steps in order, with gaps."""
    parts = st.tuples(st.floats(0, 2), st.floats(0.01, 2), st.floats(0, 9))
    gaps, lengths, amounts = np.array(draw(st.lists(parts, min_size=1, max_size=20))).T
    ends = np.cumsum(gaps + lengths)
    return ends - lengths, ends, amounts


@given(intervals(), st.integers(1, 40))
def test_values_are_split_over_the_bins_in_proportion_to_time(
    steps: tuple[Floats, Floats, Floats], num_bins: int
) -> None:
    starts, ends, values = steps
    edges = np.linspace(0, ends[-1], num_bins + 1)
    expected = np.zeros(num_bins)
    for start, end, value in zip(starts, ends, values, strict=True):
        expected += value * (np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1])).clip(0)
    found = means(starts, ends, values, edges) * np.diff(edges)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found.sum() == pytest.approx((values * (ends - starts)).sum())


def two_steps() -> list[Event]:
    """A prefill of 3 tokens in 1 s with a waiting request and 10 of 64 slots held, a decode of 3 s without and 20."""
    common: dict[str, Any] = {"request_ids": ["a"], "preempted": [], "num_running": 1, "evictable_blocks": 0}
    return [
        engine_started(),
        RequestArrived(0.0, "a", num_prompt_tokens=3, max_tokens=2, output_len=2),
        Step(
            **common,
            time=1.0,
            step=0,
            scheduled_time=0.0,
            num_scheduled=[3],
            num_computed=[0],
            num_new=[1],
            admitted=["a"],
            finished=[],
            num_waiting=1,
            free_blocks=14,
            new_blocks={"a": [0, 1]},
            token_states=3,
            reserved=1,
            internal=4,
            external=56,
            free=0,
        ),
        RequestFinished(4.0, "a", "length", 3, 2, 0, 0, 0.0, 0.0, 1.0),
        Step(
            **common,
            time=4.0,
            step=1,
            scheduled_time=1.0,
            num_scheduled=[1],
            num_computed=[3],
            num_new=[1],
            admitted=[],
            finished=["a"],
            num_waiting=0,
            free_blocks=12,
            new_blocks={"a": [2, 3]},
            token_states=4,
            reserved=0,
            internal=12,
            external=0,
            free=48,
        ),
    ]


@pytest.fixture
def run() -> RecordedRun:
    return recorded_run(two_steps())


def test_waste_is_measured_while_requests_wait(run: RecordedRun) -> None:
    waste = run.waste()
    assert waste.is_saturated
    shares = {"token_states": 3, "reserved": 1, "internal": 4, "external": 56, "free": 0}
    assert waste.shares == {kind: slots / 64 for kind, slots in shares.items()}


def test_waste_is_the_mean_of_all_steps_if_no_request_waits() -> None:
    events = two_steps()
    object.__setattr__(events[2], "num_waiting", 0)
    waste = recorded_run(events).waste()
    assert not waste.is_saturated
    assert waste.shares["token_states"] == (1 * 3 + 3 * 4) / 4 / 64


def test_time_edges_are_as_wide_as_in_the_longest_run(run: RecordedRun) -> None:
    assert time_edges(run.trace, 8.0, 4).tolist() == [0, 2, 4]
    assert time_edges(run.trace, 4.0, 3).tolist() == pytest.approx([0, 4 / 3, 8 / 3, 4])
