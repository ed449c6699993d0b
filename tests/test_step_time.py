"""The estimated time of a step and the largest chunk that it allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.step_time import CHUNK_MULTIPLE, RowTime, StepTime

per_token = st.floats(1e-6, 1e-2)
per_pair = st.one_of(st.just(0.0), st.floats(1e-9, 1e-5))


def step_time(per_token: float, per_pair: float) -> StepTime:
    return StepTime(0.0, per_token, per_pair, decode_target=0.2, prefill_target=1.0)


def test_a_chunk_attends_to_the_tokens_before_it_and_to_half_of_its_own() -> None:
    assert step_time(2.0, 0.5).chunk_seconds(10, 4) == 4 * 2.0 + 0.5 * (4 * 10 + 4 * 4 / 2)


@given(per_token, per_pair, st.integers(0, 100_000), st.floats(0, 2))
def test_the_largest_chunk_takes_at_most_its_time(token: float, pair: float, start: int, seconds: float) -> None:
    time = step_time(token, pair)
    chunk = time.largest_chunk(start, seconds)
    assert chunk % CHUNK_MULTIPLE == 0
    assert time.chunk_seconds(start, chunk) <= seconds * (1 + 1e-9)
    assert time.chunk_seconds(start, chunk + CHUNK_MULTIPLE) >= seconds * (1 - 1e-9)


def test_a_step_without_time_has_no_chunk_and_one_that_takes_none_has_no_limit() -> None:
    assert step_time(1e-3, 0).largest_chunk(0, -0.1) == 0
    assert step_time(0, 0).largest_chunk(0, 0.1) > 1 << 40


def test_row_time_is_linear_between_its_points_and_beyond_them() -> None:
    row_time = RowTime({1: 10.0, 4: 16.0, 8: 15.0, 16: 32.0})
    assert [row_time.seconds(rows) for rows in (0, 1, 2, 4, 6, 8)] == [10.0, 10.0, 12.0, 16.0, 16.0, 16.0]
    assert [row_time.seconds(rows) for rows in (12, 16, 20)] == [24.0, 32.0, 40.0]
