"""The watchdog counts intervals without progress, and only while the engine has work."""

from __future__ import annotations

from chairlift.engine.process.watchdog import PACKAGE, Watchdog, main_frame


def test_an_engine_with_work_is_stuck_only_after_a_timeout() -> None:
    watchdog = Watchdog(2.0)
    assert watchdog.interval == 0.5
    assert [watchdog.check(True) for _ in range(5)] == [False, False, False, True, False]
    assert not any(Watchdog(0.0).check(True) for _ in range(3))


def test_progress_or_an_empty_queue_restarts_the_count() -> None:
    watchdog = Watchdog(2.0)
    for _ in range(20):
        assert not any(watchdog.check(True) for _ in range(3))
        watchdog.record_progress()
        assert not watchdog.check(True)
        assert not any(watchdog.check(True) for _ in range(3))
        assert not watchdog.check(False)


def test_the_main_frame_is_of_the_main_thread_and_of_chairlift() -> None:
    def stacks(*main: str) -> str:
        lines = ["Thread 0x1 (most recent call first):", f'  File "{PACKAGE}/events.py", line 9 in write', ""]
        return "\n".join([*lines, "Current thread 0x2 (most recent call first):", *(f"  {frame}" for frame in main)])

    foreign = 'File "/venv/chairlift/lib/torch/serialization.py", line 5 in <listcomp>'
    own = f'File "{PACKAGE}/loading/gguf_file.py", line 7 in read'
    assert main_frame(stacks(foreign, own, f'File "{PACKAGE}/cli.py", line 8 in main')) == "in read (gguf_file.py:7)"
    assert main_frame(stacks(foreign)) == "in <listcomp> (serialization.py:5)"
    assert main_frame("") == "at an unknown position, because it wrote no stack"
