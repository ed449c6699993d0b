"""benchmarks/memory_map.py: compares spans of blocks with the block tables of the engine, and checks the picture."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
from benchmarks.memory_map import (
    FREE,
    ROUNDING,
    SHARED,
    BlockSpan,
    block_spans,
    draw,
    num_shown_blocks,
    owner_colours,
    paint,
    rounding_spans,
    shared_spans,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recorded_runs import RecordedRun, recorded_runs
from simulated_runs import simulated

from chairlift.core.baselines.arena import power_of_two_above
from chairlift.events import EngineStarted, Step
from chairlift.lab.report.recorded_run import recorded_run, trace_events


def started_of(run: RecordedRun) -> EngineStarted:
    first = run.events[0]
    assert isinstance(first, EngineStarted)
    return first


def steps_of(run: RecordedRun) -> list[Step]:
    steps = [event for event in run.events if isinstance(event, Step)]
    assume(steps)
    return steps


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_spans_are_the_tables(run: RecordedRun) -> None:
    steps = steps_of(run)
    trace = trace_events(run.events)
    names = [request.arrived.request_id for request in trace.requests]
    spans, found = block_spans(trace), [Counter[tuple[int, str]]() for _ in steps]
    assert all(a.first <= b.first for a, b in pairwise(spans))
    for span in spans:
        for position in range(span.first, span.last + 1):
            found[position].update((block, names[span.request]) for block in _blocks(span))
    assert found == [
        Counter((block, name) for name, holder in holders.items() for block in holder.block_ids)
        for holders in run.holders
    ]


@settings(max_examples=80, deadline=None)
@given(recorded_runs())
def test_shared_spans_are_blocks_with_several_holders(run: RecordedRun) -> None:
    steps = steps_of(run)
    found: list[set[int]] = [set() for _ in steps]
    for span in shared_spans(block_spans(trace_events(run.events))):
        for position in range(span.first, span.last + 1):
            found[position].update(_blocks(span))
    expected = []
    for holders in run.holders:
        counts = Counter(block for holder in holders.values() for block in holder.block_ids)
        expected.append({block for block, count in counts.items() if count > 1})
    assert found == expected
    block_size = started_of(run).block_size
    assert [len(blocks) * block_size for blocks in found] == [step.shared for step in steps]


@settings(max_examples=60, deadline=None)
@given(recorded_runs())
def test_rounding_spans_are_the_extra_blocks_of_the_buddy_arena(run: RecordedRun) -> None:
    steps_of(run)
    trace = trace_events(run.events)
    lost = [0] * len(run.holders)
    for span in rounding_spans(trace):
        assert span.block + span.num_blocks <= trace.started.num_blocks
        for position in range(span.first, span.last + 1):
            lost[position] += span.num_blocks
    is_buddy = trace.started.kv_arena == "buddy"
    assert lost == [
        sum(power_of_two_above(len(h.block_ids)) - len(h.block_ids) for h in holders.values()) if is_buddy else 0
        for holders in run.holders
    ]


def _blocks(span: BlockSpan) -> range:
    return range(span.block, span.block + span.num_blocks)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=30))
def test_neighbours_have_different_colours(sizes: list[int]) -> None:
    spans, block = [], 0
    for request, size in enumerate(sizes):
        spans.append(BlockSpan(block, size, 0, 0, request))
        block += size
    later = [BlockSpan(0, sizes[0], 1, 1, len(sizes))]
    colours = owner_colours([*spans, *later], block, 4)
    assert all(colours[request] != colours[request + 1] for request in range(len(sizes) - 1))
    assert colours[len(sizes)] not in (colours[0], colours[1])
    assert set(colours.values()) <= set(range(4))


def test_a_request_keeps_its_colour() -> None:
    spans = [BlockSpan(0, 2, 0, 9, 0), BlockSpan(2, 2, 1, 9, 1), BlockSpan(4, 1, 2, 9, 0), BlockSpan(5, 1, 3, 9, 2)]
    colours = owner_colours(spans, 8, 3)
    assert colours.keys() == {0, 1, 2}
    assert colours[2] != colours[0]


def test_a_block_is_shared_in_exactly_the_common_steps() -> None:
    spans = [BlockSpan(0, 4, 0, 3, 0), BlockSpan(1, 2, 3, 5, 1), BlockSpan(2, 1, 5, 9, 2), BlockSpan(3, 1, 4, 9, 3)]
    shared = [BlockSpan(1, 1, 3, 3, 1), BlockSpan(2, 1, 3, 3, 1), BlockSpan(2, 1, 5, 5, 2)]
    assert shared_spans(spans) == shared


def test_the_map_shows_owners_rounding_sharing_and_free_blocks() -> None:
    assert set(np.unique(paint(recorded_run(simulated(6))))) == {0, 1, 2, 3, 4, 5, FREE}
    assert ROUNDING in paint(recorded_run(simulated(6, kv="pow2")))
    shared = simulated(6, max_tokens=None)
    first = next(event for event in shared if isinstance(event, Step))
    names = first.request_ids[:2]
    blocks = {**first.new_blocks, names[1]: first.new_blocks[names[0]]}
    events = [replace(e, new_blocks=blocks, shared=4) if e is first else e for e in shared]
    assert SHARED in paint(recorded_run(events))


def test_the_map_of_a_large_pool_shows_only_the_used_blocks() -> None:
    size = recorded_run(simulated(6)).started.num_blocks
    events = [replace(e, num_blocks=10 * size) if isinstance(e, EngineStarted) else e for e in simulated(6)]
    large = recorded_run(events)
    used = num_shown_blocks(large)
    assert size / 2 < used <= size == num_shown_blocks(recorded_run(simulated(6)))
    (axes,) = draw([large]).axes
    assert axes.get_ylim() == (0, used)
    assert f"{10 * size:,} blocks of" in axes.get_title(loc="left") + axes.get_title()
    assert (paint(large) != FREE).mean() > 0.2
