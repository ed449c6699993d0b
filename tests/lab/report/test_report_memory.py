"""Compares kinds of slots with true lengths, and spans of blocks, with the block tables of the engine."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recorded_runs import Holder, RecordedRun, engine_started, recorded_runs

from chairlift.core.baselines.arena import power_of_two_above
from chairlift.events import EngineStarted, Step
from chairlift.lab.report.memory import (
    BlockSpan,
    MemoryKinds,
    block_spans,
    live_kinds,
    owner_colours,
    rounding_spans,
    shared_spans,
    true_kinds,
)
from chairlift.lab.report.trace import trace_events
from fakes import make_engine, make_request


def reserved_slots(holders: dict[str, Holder], written: dict[str, int], block_size: int) -> int:
    """Slots that are held and will be written, counted one by one."""
    return sum(
        holder.num_written <= slot < written[name]
        for name, holder in holders.items()
        if not holder.has_ended
        for table in holder.tables
        for slot in range(len(table) * block_size)
    )


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
def test_true_kinds_against_slots_that_were_written_in_the_end(run: RecordedRun) -> None:
    steps, started = steps_of(run), started_of(run)
    for step, kinds, holders in zip(steps, true_kinds(trace_events(run.events)), run.holders, strict=True):
        assert sum(kinds) == started.num_blocks * started.block_size
        assert kinds.reserved == reserved_slots(holders, run.written, started.block_size)
        assert kinds.reserved + kinds.internal == step.reserved + step.internal
        assert (kinds.token_states, kinds.external, kinds.free) == (step.token_states, step.external, step.free)
        assert 0 <= kinds.reserved <= step.reserved


@settings(max_examples=60, deadline=None)
@given(recorded_runs(forced=True))
def test_true_kinds_are_the_live_ones_where_max_tokens_is_the_length(run: RecordedRun) -> None:
    steps_of(run)
    assert true_kinds(trace_events(run.events)) == live_kinds(trace_events(run.events))


def test_an_early_stop_turns_reserved_into_internal() -> None:
    """`exact` reserves 3 blocks for 3 prompt tokens and max_tokens=9, but only 4 slots are written."""
    core, _, _, log = make_engine(kv="exact", num_blocks=8)
    log.events.append(engine_started(num_blocks=8, kv="exact", kv_arena="buddy"))
    core.add(make_request("a", [1, 2, 3], 9, output_len=2))
    while core.has_work:
        core.step()
    trace = trace_events(log.events)
    assert live_kinds(trace) == [MemoryKinds(3, 8, 1, 4, 16), MemoryKinds(4, 7, 1, 4, 16)]
    assert true_kinds(trace_events(log.events)) == [MemoryKinds(3, 1, 8, 4, 16), MemoryKinds(4, 0, 8, 4, 16)]


def test_an_unfinished_request_counts_with_its_max_tokens() -> None:
    core, _, _, log = make_engine(kv="exact", num_blocks=8)
    log.events.append(engine_started(num_blocks=8, kv="exact", kv_arena="buddy"))
    core.add(make_request("a", [1, 2, 3], 9))
    core.step()
    assert true_kinds(trace_events(log.events)) == [MemoryKinds(3, 8, 1, 4, 16)]


def test_a_log_without_memory_has_no_kinds() -> None:
    core, _, _, log = make_engine()
    core.add(make_request("a", [1], 1))
    while core.has_work:
        core.step()
    fields = ("token_states", "reserved", "internal", "external", "free")
    for event in log.events:
        for name in fields if isinstance(event, Step) else ():
            object.__setattr__(event, name, 0)
    assert live_kinds(trace_events([engine_started(num_blocks=64), *log.events])) is None


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
