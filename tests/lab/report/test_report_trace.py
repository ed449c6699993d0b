"""Compares residencies, lanes and cells with what the engine held and computed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from benchmarks.batch_picture import LaneCell, assign_lanes, lane_cells, lane_shares
from benchmarks.drawing import is_timed
from benchmarks.row_phases import RowKind, row_phases
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recorded_runs import GeneratedRun, engine_started, recorded_runs

from chairlift.events import RequestArrived, RequestFinished, Step
from chairlift.lab.report.recorded_run import trace_events
from support.fakes import make_engine, make_request


def has_steps(run: GeneratedRun) -> bool:
    return any(isinstance(event, Step) for event in run.events)


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_residencies_are_those_that_held_memory(run: GeneratedRun) -> None:
    assume(has_steps(run))
    trace = trace_events(run.events)
    held: list[dict[str, Counter[int]]] = [{} for _ in trace.steps]
    for residency in trace.residencies:
        for position in range(residency.first, residency.last + 1):
            name, blocks = residency.request.request_id, Counter[int]()
            for step in trace.steps[residency.first : position + 1]:
                blocks.update(step.new_blocks.get(name, ()))
                blocks.subtract(step.released_blocks.get(name, ()))
            assert name not in held[position]
            held[position][name] = +blocks
    assert held == [{name: Counter(holder.block_ids) for name, holder in step.items()} for step in run.holders]


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_lanes_are_the_lowest_free_seats(run: GeneratedRun) -> None:
    assume(has_steps(run))
    trace = trace_events(run.events)
    lanes = assign_lanes(trace.residencies)
    lane_of: dict[int, int] = {}
    for position, step in enumerate(run.holders):
        present = {i for i, residency in enumerate(trace.residencies) if residency.first <= position <= residency.last}
        assert len(present) == len(step)
        lane_of = {i: lane for i, lane in lane_of.items() if i in present}
        for newcomer in sorted(present - lane_of.keys()):
            lane_of[newcomer] = next(n for n in range(99) if n not in lane_of.values())
        assert lane_of == {i: lanes[i] for i in present}
    seats = trace.started.static_batch_size or trace.started.max_num_seqs
    assert max(lanes) < seats


@settings(max_examples=60, deadline=None)
@given(recorded_runs())
def test_lane_cells_have_the_kind_of_each_row(run: GeneratedRun) -> None:
    assume(has_steps(run))
    trace = trace_events(run.events)
    kinds: dict[tuple[int, str], RowKind] = {}
    for residency, phases in row_phases(trace):
        for phase in phases:
            for position in range(phase.first, phase.last + 1):
                kinds[position, residency.request.arrived.request_id] = phase.kind
    has_sampled: set[str] = set()
    for position, step in enumerate(trace.steps):
        has_sampled -= set(step.admitted)
        for row, name in enumerate(step.request_ids):
            expected = RowKind.DECODE if name in has_sampled else RowKind.PREFILL
            assert kinds.pop((position, name)) is (expected if step.num_scheduled[row] else RowKind.PADDING)
            if step.num_new[row]:
                has_sampled.add(name)
    assert not kinds


def test_static_batch_of_three() -> None:
    """Prompts of 2, 4 and 3 tokens, outputs of 1, 3 and 2: prefill in one step, then each pads after its end."""
    core, _, executor, log = make_engine(batching="static", static_batch_size=3, kv="paged")
    log.events.append(engine_started(num_blocks=64, batching="static", static_batch_size=3))
    submit = executor.submit
    executor.submit = lambda output: (submit(output), core._clock.advance(1.0))[0]  # type: ignore[method-assign]
    for name, num_prompt_tokens, num_output_tokens in (("a", 2, 1), ("b", 4, 3), ("c", 3, 2)):
        core.add(make_request(name, [7] * num_prompt_tokens, num_output_tokens))
    while core.has_work:
        core.step()
    assert lane_cells(trace_events(log.events)) == [
        LaneCell(0, RowKind.PREFILL, 0, 0.0, 1.0),
        LaneCell(0, RowKind.PADDING, 0, 1.0, 3.0),
        LaneCell(1, RowKind.PREFILL, 1, 0.0, 1.0),
        LaneCell(1, RowKind.DECODE, 1, 1.0, 3.0),
        LaneCell(2, RowKind.PREFILL, 2, 0.0, 1.0),
        LaneCell(2, RowKind.DECODE, 2, 1.0, 2.0),
        LaneCell(2, RowKind.PADDING, 2, 2.0, 3.0),
    ]


def test_a_request_that_ended_may_be_preempted_and_release_blocks_in_a_later_step() -> None:
    zeros = {"num_waiting": 0, "free_blocks": 0, "evictable_blocks": 0}
    both, one = ["a", "b"], ["a"]
    trace = trace_events(
        [
            engine_started(),
            *(RequestArrived(0.0, name, 1, 4) for name in both),
            Step(1.0, 0, 0.0, both, [1, 1], [0, 0], [1, 1], both, [], [], 2, **zeros, new_blocks={"a": [0], "b": [1]}),
            RequestFinished(1.0, "b", "abort", 1, 1, 0, 0, 0.0, 0.0, 1.0, step=1),
            Step(2.0, 1, 1.0, one, [1], [1], [1], [], ["b"], [], 1, **zeros, released_blocks={"b": [1]}),
        ]
    )
    spans = {residency.request.request_id: (residency.first, residency.last) for residency in trace.residencies}
    assert spans == {"a": (0, 1), "b": (0, 0)}


def test_without_a_moving_clock_the_axis_counts_steps() -> None:
    core, _, _, log = make_engine()
    log.events.append(engine_started(num_blocks=64))
    core.add(make_request("a", [1, 2, 3], 4))
    while core.has_work:
        core.step()
    trace = trace_events(log.events)
    assert not is_timed(trace)
    assert trace.duration == len(trace.steps) == 4
    assert trace.held_ends().tolist() == [1, 2, 3, 4]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(RowKind), st.floats(0, 1), st.floats(0, 1)), max_size=12),
    st.integers(1, 17),
)
def test_lane_shares_keep_all_time(drawn: list[tuple[int, RowKind, float, float]], num_columns: int) -> None:
    """The time of each cell is added to the columns of its lane and kind."""
    duration = 8.0
    cells, clock = [], [0.0] * 4
    for lane, kind, gap, length in drawn:
        start = clock[lane] + gap * (duration - clock[lane])
        clock[lane] = start + length * (duration - start)
        cells.append(LaneCell(lane, kind, 0, start, clock[lane]))
    shares = lane_shares(cells, 4, duration, num_columns)
    edges = np.linspace(0, duration, num_columns + 1)
    expected = np.zeros_like(shares)
    for cell in cells:
        inside = np.minimum(cell.end, edges[1:]) - np.maximum(cell.start, edges[:-1])
        expected[cell.kind, cell.lane] += inside.clip(0) * num_columns / duration
    assert shares == pytest.approx(expected, abs=1e-9)
