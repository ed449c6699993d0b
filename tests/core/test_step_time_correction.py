"""The estimated time of steps becomes shorter when the machine is faster than at the start."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.clock import VirtualClock
from chairlift.core.engine_core import EngineCore
from chairlift.core.step_time_correction import MAX_RATIO, MIN_RATIO, MIN_STEPS, WINDOW_SECONDS, StepTimeCorrection
from chairlift.events import Event, EventList, RequestArrived, Step, StepTimeChanged, from_json
from chairlift.observability.event_log import encode_event
from chairlift.observability.replay import Replay
from chairlift.step_time import CHUNK_MULTIPLE, StepTime
from support.fakes import make_engine, make_request
from support.operations import count_operations
from support.tracked_engine import TimedExecutor, started

SLOW = StepTime(fixed=5.0, per_token=0.5, per_pair=1e-4, decode_target=12.0, prefill_target=40.0)

SHORT = SLOW.scaled(0.01)

Observed = tuple[int, float, float]
"""A step: its tokens, the seconds that it takes for each estimated one, and the idle seconds before it."""

observed = st.tuples(st.integers(8, 64), st.floats(0, 1.2), st.floats(0, 10))


def corrections(steps: list[Observed]) -> list[tuple[float, StepTime]]:
    """The estimates with the times at which they begin, the first one at 0."""
    found = [(0.0, SHORT)]
    correction, now = StepTimeCorrection(SHORT, lambda new: found.append((now, new))), 0.0
    for num_tokens, factor, idle in steps:
        request = make_request("r", [1])
        request.num_computed_tokens = num_tokens
        now += idle
        correction.record_step([request], [num_tokens], now)
        before = found[-1][1]
        now += factor * (before.fixed + before.chunk_seconds(0, num_tokens))
        changed = correction.record_result(now)
        assert changed == (None if found[-1][1] == before else found[-1][1])
    return found


def parts(time: StepTime) -> tuple[float, float, float]:
    return time.fixed, time.per_token, time.per_pair


@given(st.lists(observed, min_size=20, max_size=60))
def test_an_estimate_only_becomes_shorter_at_most_once_in_a_window(steps: list[Observed]) -> None:
    found = corrections(steps)
    assert found == corrections(steps), "the same steps lead to the same estimates"
    for (since, before), (until, after) in pairwise(found):
        assert until - since >= WINDOW_SECONDS
        for old, new in zip(parts(before), parts(after), strict=True):
            assert MIN_RATIO * old <= new <= MAX_RATIO * old
        assert (after.decode_target, after.prefill_target) == (SHORT.decode_target, SHORT.prefill_target)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(MAX_RATIO + 1e-6, 9), st.floats(0, 30)), max_size=60))
def test_steps_that_take_their_time_change_nothing(steps: list[Observed]) -> None:
    assert corrections(steps) == [(0.0, SHORT)]


@given(st.floats(MIN_RATIO, MAX_RATIO - 1e-6), st.integers(CHUNK_MULTIPLE, 64))
def test_the_estimate_becomes_the_time_of_the_steps(factor: float, num_tokens: int) -> None:
    found = corrections([(num_tokens, factor, WINDOW_SECONDS / MIN_STEPS)] * (MIN_STEPS + 1))
    (_, after) = found[1]
    assert all(abs(new - factor * old) <= 1e-9 * old for old, new in zip(parts(SHORT), parts(after), strict=True))
    assert len(found) == 2


def test_steps_without_chunks_are_not_compared() -> None:
    for num_tokens, is_compared in ((CHUNK_MULTIPLE, True), (CHUNK_MULTIPLE - 1, False), (1, False)):
        assert (len(corrections([(num_tokens, 0.5, WINDOW_SECONDS)] * MIN_STEPS)) > 1) == is_compared


def test_steps_that_are_mostly_attention_are_not_compared() -> None:
    """Their time also depends on the windows of layers, which the estimate does not know."""
    for start, is_compared in ((0, True), (20_000, False)):
        correction, now = StepTimeCorrection(SHORT, lambda _: None), 0.0
        request, changed = make_request("r", [1]), []
        for _ in range(MIN_STEPS):
            request.num_computed_tokens = start + 64
            correction.record_step([request], [64], now)
            now += 0.5 * (SHORT.fixed + SHORT.chunk_seconds(start, 64))
            changed.append(correction.record_result(now))
            now += WINDOW_SECONDS
        assert any(changed) == is_compared


def run(prompts: list[int], **options: Any) -> tuple[list[Event], dict[str, list[int]]]:
    """The events of an engine that is ten times as fast as estimated, and the tokens of its requests."""
    core, _, executor, log = make_engine(num_blocks=400, max_num_batched_tokens=128, **options)
    clock = VirtualClock()
    core = EngineCore(core.scheduler, TimedExecutor(executor, clock, base=0.5, per_token=0.05), clock)
    tokens: dict[str, list[int]] = {}
    for number, length in enumerate(prompts):
        request = make_request(f"r{number}", [number, *range(length)], max_tokens=6)
        request.arrival_time = clock.now()
        core.add(request)
        for _ in range(4):
            for output in core.step():
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        clock.advance(10.0)
    while core.has_work:
        for output in core.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return log.events, tokens


def replay(events: list[Event], prompts: list[int], **options: Any) -> list[Event]:
    """The events of a scheduler that gets the arrivals of a log, and the times of its steps."""
    core, _, executor, log = make_engine(num_blocks=400, max_num_batched_tokens=128, **options)
    for event in events:
        if isinstance(event, RequestArrived):
            number = int(event.request_id[1:])
            request = make_request(event.request_id, [number, *range(prompts[number])], max_tokens=6)
            request.arrival_time = event.time
            core.scheduler.add(request)
        elif isinstance(event, Step):
            output = core.scheduler.schedule(event.scheduled_time)
            assert output is not None
            core.scheduler.update(executor.submit(output), event.time)
    return log.events


@settings(max_examples=4)
@given(st.lists(st.integers(60, 150), min_size=9, max_size=12), st.sampled_from(["fcfs", "edf"]))
def test_the_log_of_an_engine_replays_to_the_same_steps_and_tokens_do_not_change(
    prompts: list[int], policy: str
) -> None:
    events, tokens = run(prompts, step_time=SLOW, scheduling_policy=policy)
    changes = [event for event in events if isinstance(event, StepTimeChanged)]
    assert changes
    assert replay(events, prompts, step_time=SLOW, scheduling_policy=policy) == events
    assert [from_json(encode_event(event)) for event in changes] == changes
    assert tokens == run(prompts, scheduling_policy=policy)[1], "tokens do not depend on chunks"


def largest_chunks(events: list[Event]) -> list[int]:
    """The largest chunks before the first change of the estimate and after the last one."""
    changes = [number for number, event in enumerate(events) if isinstance(event, StepTimeChanged)]
    return [
        max(max(event.num_scheduled) for event in part if isinstance(event, Step))
        for part in (events[: changes[0]], events[changes[-1] :])
    ]


def test_chunks_become_longer_when_steps_are_faster_than_estimated() -> None:
    for pace in (None, 5.0):
        events, _ = run([150] * 24, step_time=SLOW, pacing_tokens_per_second=pace)
        slow, fast = largest_chunks(events)
        assert slow == SLOW.largest_chunk(0, SLOW.prefill_target - SLOW.fixed) < fast
        first = next(event for event in events if isinstance(event, StepTimeChanged))
        assert first.step == 1 + max(e.step for e in events[: events.index(first)] if isinstance(e, Step))


def test_a_replay_has_the_latest_estimate() -> None:
    _, manager, *_ = make_engine()
    tracker = Replay()
    change = StepTimeChanged(9.0, 3, {"fixed": 1.0})
    for event in (change, started(manager), change):
        tracker.emit(event)
    assert tracker.started is not None
    assert tracker.started.step_time == {"fixed": 1.0}
    tracker.emit(started(manager))
    assert tracker.started.step_time is None


def test_the_comparison_costs_a_step_of_decodes_a_few_operations() -> None:
    def operations(step_time: StepTime | None, num_requests: int) -> int:
        core, _, _, log = make_engine(step_time=step_time, num_blocks=512, max_num_seqs=64, max_num_batched_tokens=512)
        for number in range(num_requests):
            core.add(make_request(f"r{number}", [number], max_tokens=40))
        core.step()
        assert isinstance(log, EventList)
        return count_operations(lambda: [core.step() for _ in range(10)]) // 10

    costs = [operations(SLOW, size) - operations(None, size) for size in (4, 64)]
    assert max(costs) < 20
