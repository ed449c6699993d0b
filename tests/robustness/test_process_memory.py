"""The memory of processes by their roles, and its slope."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest
from tools.process_memory import MIN_SAMPLES, WINDOW_SECONDS, MemoryLog, read_memory, role_of, slope

CODE = "import sys; print(flush=True); sys.stdin.read()"
SLEEPER = [sys.executable, "-c", CODE, "-m", "chairlift.made_up.sleeper"]
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it is read from /proc")


def test_the_slope_of_a_line_is_exact_and_that_of_noise_small() -> None:
    times = [5.0 * index for index in range(100)]
    assert slope(times, [1000 + 7 * round(time) for time in times]) == pytest.approx(7 * WINDOW_SECONDS)
    assert slope(times, [10_000 + 100 * (index % 2) for index in range(100)]) == pytest.approx(0, abs=150)


def test_private_memory_contains_what_a_process_has_written() -> None:
    before = read_memory(os.getpid())
    with mmap.mmap(-1, 1 << 25) as written:  # the heap could have as much free memory
        written.write(bytes(len(written)))
        after = read_memory(os.getpid())
        assert after.private - before.private >= 0.9 * len(written)
    assert after.pss >= after.private > before.private


def test_processes_are_logged_by_role() -> None:
    assert role_of(["python", "-m", "chairlift", "serve"]) == "http"
    with subprocess.Popen(SLEEPER, **PIPES) as first, subprocess.Popen(SLEEPER, **PIPES) as second:
        for process in (first, second):
            assert process.stdout is not None
            process.stdout.readline()  # Its interpreter has started, and its memory does not change any more.
        log = MemoryLog(os.getpid())
        for time in range(MIN_SAMPLES):
            log.sample(float(time))
        sizes = [read_memory(process.pid).private for process in (first, second)]
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.close()
    (trend,) = [trend for trend in log.trends(since=0.0) if trend.role == "sleeper"]
    assert trend.num_processes == 2
    assert trend.last.private == pytest.approx(sum(sizes), rel=0.1)
    assert log.trends(since=1e9) == []
