"""Silence counts only while there is work, and in looks, not in clock time."""

from __future__ import annotations

from chairlift.engine.process.watchdog import PACKAGE, Watchdog, main_frame


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


def test_the_frame_that_is_told_is_the_main_threads_and_our_own() -> None:
    def stacks(*main: str) -> str:
        lines = ["Thread 0x1 (most recent call first):", f'  File "{PACKAGE}/events.py", line 9 in write', ""]
        return "\n".join([*lines, "Current thread 0x2 (most recent call first):", *(f"  {frame}" for frame in main)])

    foreign = 'File "/venv/chairlift/lib/torch/serialization.py", line 5 in <listcomp>'
    own = f'File "{PACKAGE}/loading/gguf_file.py", line 7 in read'
    assert main_frame(stacks(foreign, own, f'File "{PACKAGE}/cli.py", line 8 in main')) == "in read (gguf_file.py:7)"
    assert main_frame(stacks(foreign)) == "in <listcomp> (serialization.py:5)"
    assert main_frame("") == "not far enough to say where"
