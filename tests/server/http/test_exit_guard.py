"""The guard process of a server: its deadline, and the processes that it kills."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from chairlift.server.http.exit_guard import ExitDeadline, descendants, end_processes

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_the_first_two_signals_to_stop_set_the_deadline() -> None:
    deadline = ExitDeadline(65.0, 2.0)
    deadline.receive(signal.SIGCHLD, 10.0)
    assert deadline.time == math.inf
    deadline.receive(signal.SIGTERM, 10.0)
    assert deadline.time == 75.0
    deadline.receive(signal.SIGINT, 20.0)
    assert deadline.time == 22.0
    deadline.receive(signal.SIGINT, 21.9)
    assert deadline.time == 22.0, "a third signal does not postpone it"


def test_a_late_second_signal_does_not_postpone_the_deadline() -> None:
    deadline = ExitDeadline(5.0, 2.0)
    deadline.receive(signal.SIGTERM, 0.0)
    deadline.receive(signal.SIGTERM, 4.5)
    assert deadline.time == 5.0


@needs_proc
def test_descendants_that_do_not_end_are_killed() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()']); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        while len(family := descendants(os.getpid())) < 2:
            time.sleep(0.01)
        processes = [psutil.Process(pid) for pid, _ in family]
        assert child.pid in [pid for pid, _ in family]
        another_start = [(pid, start + 1) for pid, start in family]
        end_processes(another_start, 0.0)
        assert all(process.is_running() for process in processes), "these ids belong to other processes"
        end_processes(family, 0.0)
        _, remaining = psutil.wait_procs(processes, timeout=5)
        assert not remaining


@needs_proc
def test_processes_that_end_in_time_are_not_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"]) as child:
        family = [found for found in descendants(os.getpid()) if found[0] == child.pid]
        end_processes(family, 10.0)
        assert child.wait() == 0
