from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from worker_fakes import reference_uniform

from chairlift.worker.random_stream import stream_key, uniform


def _stream(seed: int, positions: np.ndarray) -> np.ndarray:
    return uniform(np.full(len(positions), stream_key(seed)), positions)


@given(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 1 << 40))
def test_uniform_equals_a_computation_with_python_integers(seed: int, position: int) -> None:
    drawn = _stream(seed, np.array([position]))
    assert drawn.tolist() == [reference_uniform(seed, position)]
    assert 0 <= drawn[0] < 1


@pytest.mark.parametrize("seed", [0, 1, 12345, -1])
def test_draws_along_a_sequence_are_uniform(seed: int) -> None:
    draws = _stream(seed, np.arange(20000))
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_draws_across_seeds_are_uniform() -> None:
    keys = np.array([stream_key(seed) for seed in range(20000)])
    draws = uniform(keys, np.full(len(keys), 17))
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_consecutive_seeds_have_different_streams() -> None:
    golden = 0x9E3779B97F4A7C15
    first, second = _stream(5, np.arange(1000)), _stream(5 + golden, np.arange(1000))
    assert not np.intersect1d(first, second).size


def test_a_draw_is_below_its_total() -> None:
    largest = 1 - 2.0**-52
    for total in (1.0, 1.5, 3.0, np.nextafter(2.0, 1.0), 1e-30, 151936.0):
        assert total * largest < total
