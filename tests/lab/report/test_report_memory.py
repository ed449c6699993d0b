"""Compares kinds of slots with true lengths with the block tables of the engine."""

from __future__ import annotations

from hypothesis import assume, given, settings
from recorded_runs import Holder, RecordedRun, engine_started, recorded_runs

from chairlift.events import SLOT_KINDS, EngineStarted, Event, Step
from chairlift.lab.report.recorded_run import steps_with_true_kinds, trace_events
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
    true_steps = steps_with_true_kinds(trace_events(run.events))
    for step, kinds, holders in zip(steps, true_steps, run.holders, strict=True):
        assert sum(slots(kinds)) == started.num_blocks * started.block_size
        assert kinds.reserved == reserved_slots(holders, run.written, started.block_size)
        assert kinds.reserved + kinds.internal == step.reserved + step.internal
        assert (kinds.token_states, kinds.external, kinds.free) == (step.token_states, step.external, step.free)
        assert 0 <= kinds.reserved <= step.reserved


@settings(max_examples=60, deadline=None)
@given(recorded_runs(forced=True))
def test_true_kinds_are_the_live_ones_where_max_tokens_is_the_length(run: RecordedRun) -> None:
    steps = steps_of(run)
    assert steps_with_true_kinds(trace_events(run.events)) == steps


def test_an_early_stop_turns_reserved_into_internal() -> None:
    """`exact` reserves 3 blocks for 3 prompt tokens and max_tokens=9, but only 4 slots are written."""
    core, _, _, log = make_engine(kv="exact", num_blocks=8)
    log.events.append(engine_started(num_blocks=8, kv="exact", kv_arena="buddy"))
    core.add(make_request("a", [1, 2, 3], 9, output_len=2))
    while core.has_work:
        core.step()
    live = [slots(event) for event in log.events if isinstance(event, Step)]
    assert live == [(3, 8, 1, 4, 16), (4, 7, 1, 4, 16)]
    assert true_slots(log.events) == [(3, 1, 8, 4, 16), (4, 0, 8, 4, 16)]


def test_an_unfinished_request_counts_with_its_max_tokens() -> None:
    core, _, _, log = make_engine(kv="exact", num_blocks=8)
    log.events.append(engine_started(num_blocks=8, kv="exact", kv_arena="buddy"))
    core.add(make_request("a", [1, 2, 3], 9))
    core.step()
    assert true_slots(log.events) == [(3, 8, 1, 4, 16)]
