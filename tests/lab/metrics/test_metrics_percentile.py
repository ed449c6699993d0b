"""Compares percentiles with those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.metrics.percentile import Summary, percentile

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(NUMBERS, st.floats(0, 100))
def test_percentiles_equal_those_of_numpy(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_percentiles_at_the_ends_and_in_the_middle() -> None:
    assert [percentile([4.0, 1.0, 2.0, 3.0], percent) for percent in (0, 50, 75, 100)] == [1.0, 2.5, 3.25, 4.0]
    assert percentile([7.0], 99) == 7.0


@given(NUMBERS)
def test_summary(values: list[float]) -> None:
    summary = Summary.from_values(values)
    assert summary is not None
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert summary.p50 <= summary.p90 <= summary.p99 <= summary.max == max(values)


def test_no_values_no_summary() -> None:
    assert Summary.from_values([]) is None
