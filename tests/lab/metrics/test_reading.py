"""The quality of experience of streams."""

from __future__ import annotations

import pytest

from chairlift.lab.metrics.requests import ReadingCurve
from chairlift.slo import SLO


def qoe(times: list[float], slo: SLO | None = None) -> float | None:
    curve = ReadingCurve(2.0, slo)
    for time in times:
        curve.add(time)
    return curve.qoe()


def test_a_reader_who_never_waits_has_the_best_experience() -> None:
    assert qoe([]) is None
    assert qoe([0.1]) == qoe([0.0] * 10) == qoe([1.0, 1.5, 2.0]) == 1
    assert qoe([0.5, 1.0], SLO(ttft_ms=500)) == 1


def test_delays_are_a_share_of_the_time_of_reading() -> None:
    # Two tokens are expected at 1 s and 1.5 s, are read at 3 s and 3.5 s, and the second one has been read at 4 s.
    assert qoe([3.0, 3.0]) == pytest.approx(1 - (2 + 2) / (3 + 2.5))
    assert qoe([1.0, 1.5, 4.0]) == pytest.approx(1 - 2 / (3.5 + 3 + 2.5))
    assert qoe([3.0, 3.0], SLO(tpot_ms=5)) == qoe([3.0, 3.0])
    assert qoe([3.0, 3.0], SLO(ttft_ms=3000)) == 1


def test_a_longer_stall_is_worse() -> None:
    values = [qoe([1.0, 1.0, 1.0, 1.0, stall, stall]) for stall in (2.0, 4.0, 8.0, 16.0)]
    assert values == sorted(values, reverse=True)  # type: ignore[type-var]
    assert len(set(values)) == 4
