"""Chunks of prompts that are limited by the estimated time of a step."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.chunk_allowance import ChunkAllowance
from chairlift.core.queues.earliest_deadline import EarliestDeadlineQueue
from chairlift.events import Step
from chairlift.slo import SLO
from chairlift.step_time import CHUNK_MULTIPLE, RowTime, StepTime
from support.fakes import make_engine, make_request

TIME = StepTime(fixed=0.01, per_token=0.001, per_pair=1e-5, decode_target=0.05, prefill_target=0.5)


def engine(step_time: StepTime | None = TIME, **options: Any) -> Any:
    defaults = {"num_blocks": 512, "max_num_batched_tokens": 400, "max_model_len": 1024}
    return make_engine(**{**defaults, **options}, step_time=step_time)


def chunks(events: Any, request_id: str) -> list[int]:
    steps = [event for event in events.events if isinstance(event, Step)]
    return [dict(zip(s.request_ids, s.num_scheduled, strict=True)).get(request_id, 0) for s in steps]


def test_a_prompt_alone_has_long_chunks_and_shorter_ones_while_another_request_decodes() -> None:
    core, _, _, events = engine()
    core.add(make_request("alone", list(range(600)), max_tokens=2))
    while core.has_work:
        core.step()
    first, second, *_ = chunks(events, "alone")
    assert first == TIME.largest_chunk(0, 0.49) == 224
    assert second == TIME.largest_chunk(first, 0.49) < first, "attention to the first chunk takes a part of the step"
    core.add(make_request("stream", [1, 2], max_tokens=40))
    core.step()
    core.add(make_request("late", list(range(1, 601)), max_tokens=1))
    core.step()
    decode = TIME.chunk_seconds(2, 1)
    assert chunks(events, "late")[-1] == max(CHUNK_MULTIPLE, TIME.largest_chunk(0, 0.04 - decode)) == 32
    assert chunks(events, "stream")[-1] == 1


def test_the_chunks_of_a_step_share_its_time() -> None:
    core, _, _, events = engine()
    core.add(make_request("first", list(range(150)), max_tokens=1))
    core.add(make_request("second", list(range(200, 500)), max_tokens=1))
    core.step()
    left = 0.49 - TIME.chunk_seconds(0, 150)
    assert (chunks(events, "first"), chunks(events, "second")) == ([150], [TIME.largest_chunk(0, left)])


def test_prompts_progress_if_the_time_is_too_short_for_any_chunk() -> None:
    slow = StepTime(fixed=1.0, per_token=0.1, per_pair=0.0, decode_target=0.05, prefill_target=0.5)
    core, _, _, events = engine(slow)
    for name in ("a", "b"):
        core.add(make_request(name, list(range(40)), max_tokens=1))
    while core.has_work:
        core.step()
    assert chunks(events, "a")[:3] == [16, 16, 8]
    assert chunks(events, "b")[:3] == [1, 1, 8], "each prompt gets a token, and what the others leave of 16"


def test_without_a_time_of_steps_only_the_token_budget_limits_chunks() -> None:
    assert ChunkAllowance(None, []).take(5000, 4096) == 4096


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=8),
    st.floats(0, 1e-2),
    st.floats(0, 1e-5),
)
def test_chunks_exceed_the_target_only_by_the_guaranteed_tokens(
    wanted: list[tuple[int, int]], per_token: float, per_pair: float
) -> None:
    time = StepTime(0.0, per_token, per_pair, decode_target=0.2, prefill_target=1.0)
    allowance = ChunkAllowance(time, [])
    taken = [allowance.take(start, count) for start, count in wanted]
    assert all(1 <= got <= count for got, (_, count) in zip(taken, wanted, strict=True))
    seconds = sum(time.chunk_seconds(start, got) for got, (start, _) in zip(taken, wanted, strict=True))
    longest = max(start for start, _ in wanted)
    guaranteed = time.chunk_seconds(longest, CHUNK_MULTIPLE) + len(wanted) * time.chunk_seconds(longest, 1)
    assert seconds <= (1.0 + guaranteed) * (1 + 1e-9)


def test_under_edf_a_step_keeps_the_time_per_output_token_of_the_streams() -> None:
    own = f"{EarliestDeadlineQueue.__module__}:EarliestDeadlineQueue"
    for policy, slo_ms, seconds, pace in (
        ("edf", 30, 0.03, None),
        ("edf", 9e6, 0.05, None),
        ("fcfs", 30, 0.05, None),
        (own, 30, 0.03, None),
        (own, 30, 0.03, 5.0),
    ):
        core, _, _, events = engine(scheduling_policy=policy, pacing_tokens_per_second=pace)
        core.add(make_request("stream", [1, 2], max_tokens=40, slo=SLO(tpot_ms=slo_ms)))
        core.step()
        core.add(make_request("prompt", list(range(1, 601)), max_tokens=1))
        core.step()
        rest = seconds - TIME.fixed - TIME.chunk_seconds(2, 1)
        assert chunks(events, "prompt")[-1] == max(CHUNK_MULTIPLE, TIME.largest_chunk(0, rest))


def test_an_objective_that_a_step_without_chunks_misses_does_not_shorten_chunks() -> None:
    for slos_ms, seconds in (([0.001], 0.05), ([0.001, 30], 0.03)):
        core, _, _, events = engine(scheduling_policy="edf")
        for index, slo_ms in enumerate(slos_ms):
            core.add(make_request(f"stream{index}", [1, index], max_tokens=40, slo=SLO(tpot_ms=slo_ms)))
        core.step()
        core.add(make_request("prompt", list(range(2, 602)), max_tokens=1))
        core.step()
        rest = seconds - TIME.fixed - len(slos_ms) * TIME.chunk_seconds(2, 1)
        assert chunks(events, "prompt")[-1] == TIME.largest_chunk(0, rest)


per_token = st.floats(1e-6, 1e-2)
per_pair = st.one_of(st.just(0.0), st.floats(1e-9, 1e-5))


def step_time(per_token: float, per_pair: float) -> StepTime:
    return StepTime(0.0, per_token, per_pair, decode_target=0.2, prefill_target=1.0)


def test_times_of_chunks() -> None:
    assert step_time(2.0, 0.5).chunk_seconds(10, 4) == 4 * 2.0 + 0.5 * (4 * 10 + 4 * 4 / 2)
    assert step_time(1e-3, 0).largest_chunk(0, -0.1) == 0
    assert step_time(0, 0).largest_chunk(0, 0.1) > 1 << 40


@given(per_token, per_pair, st.integers(0, 100_000), st.floats(0, 2))
def test_the_largest_chunk_takes_at_most_its_time(token: float, pair: float, start: int, seconds: float) -> None:
    time = step_time(token, pair)
    chunk = time.largest_chunk(start, seconds)
    assert chunk % CHUNK_MULTIPLE == 0
    assert time.chunk_seconds(start, chunk) <= seconds * (1 + 1e-9)
    assert time.chunk_seconds(start, chunk + CHUNK_MULTIPLE) >= seconds * (1 - 1e-9)


def test_row_time_is_linear_between_its_points_and_beyond_them() -> None:
    row_time = RowTime({1: 10.0, 4: 16.0, 8: 15.0, 16: 32.0})
    assert [row_time.seconds(rows) for rows in (0, 1, 2, 4, 6, 8)] == [10.0, 10.0, 12.0, 16.0, 16.0, 16.0]
    assert [row_time.seconds(rows) for rows in (12, 16, 20)] == [24.0, 32.0, 40.0]
