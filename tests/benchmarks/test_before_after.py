"""benchmarks/before_after.py: its arrivals and its ratios. `test_comparisons_of_servers.py` runs it."""

from __future__ import annotations

from benchmarks import before_after


def test_arrivals_are_those_of_the_seed() -> None:
    times = before_after.arrival_times(50, 10.0, 1)
    assert times == before_after.arrival_times(50, 10.0, 1) == sorted(times)
    assert times != before_after.arrival_times(50, 10.0, 2)
    assert (len(times), min(times) >= 0, max(times) <= 10) == (50, True, True)


def test_the_ratio_of_each_round_is_after_over_before() -> None:
    results = {"before": [{"a": 2.0, "b": 0.0}, {"a": 4.0, "b": 1.0}], "after": [{"a": 1.0, "b": 1.0}] * 2}
    assert before_after.change_of(results, "a") == [0.5, 0.25]
    first, second = before_after.change_of(results, "b")
    assert first != first, "not a number"
    assert second == 1.0
