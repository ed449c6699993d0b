"""Silence counts only while there is work, and in looks, not in clock time."""

from __future__ import annotations

from chairlift.engine.watchdog import Watchdog


def test_silence_with_work_is_noticed_after_the_limit() -> None:
    watchdog = Watchdog(2.0)
    assert watchdog.interval == 0.5
    assert [watchdog.is_stuck(True) for _ in range(5)] == [False, False, False, True, False]


def test_without_a_limit_nothing_is_stuck() -> None:
    assert not any(Watchdog(0.0).is_stuck(True) for _ in range(3))


def test_a_step_or_an_empty_queue_begins_the_count_again() -> None:
    watchdog = Watchdog(2.0)
    for _ in range(20):
        assert not any(watchdog.is_stuck(True) for _ in range(3))
        watchdog.heard()
        assert not watchdog.is_stuck(True)
        assert not any(watchdog.is_stuck(True) for _ in range(3))
        assert not watchdog.is_stuck(False)
