"""Checks summaries of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.lab.metrics.run import Summary

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(NUMBERS)
def test_summary(values: list[float]) -> None:
    summary = Summary.from_values(values)
    assert summary is not None
    assert summary.count == len(values)
    assert summary.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert summary.p50 <= summary.p90 <= summary.p99 <= summary.max == max(values)


def test_percentiles_are_interpolated() -> None:
    summary = Summary.from_values([4.0, 1.0, 2.0, 3.0])
    assert summary is not None
    assert (summary.p50, summary.p90, summary.p99) == pytest.approx((2.5, 3.7, 3.97))


def test_no_values_no_summary() -> None:
    assert Summary.from_values([]) is None
