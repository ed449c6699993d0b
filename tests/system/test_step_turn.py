"""Tests the lock by which processes compute in turns."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from chairlift.clock import VirtualClock
from chairlift.system.step_turn import LONGEST_PAUSE_SECONDS, MAX_WAIT_SECONDS, StepTurn

WORK = """
import fcntl, sys, time
from pathlib import Path
from chairlift.system import step_turn

folder, log, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
step_turn.MAX_WAIT_SECONDS = 120.0
turn = step_turn.StepTurn(folder)
next_file = (folder / "next").open("w")

def other_waits():
    try:
        fcntl.flock(next_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(next_file, fcntl.LOCK_UN)
    return False

(folder / f"ready-{name}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.001)
for _ in range(40):
    with turn, log.open("a") as file:
        file.write(f"{name} begins\\n")
        file.flush()
        while not other_waits() and not list(folder.glob("done-*")):
            time.sleep(0.001)
        file.write(f"{name} ends\\n")
(folder / f"done-{name}").touch()
"""
"""Uses the turn 40 times, each time until the other process waits for it."""


def test_two_processes_that_compute_all_the_time_alternate(tmp_path: Path) -> None:
    log = tmp_path / "log"
    workers = [subprocess.Popen([sys.executable, "-c", WORK, tmp_path, log, name]) for name in "ab"]
    for worker in workers:
        assert worker.wait(120) == 0
    lines = log.read_text().splitlines()
    assert len(lines) == 160
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert (begin.split()[0], begin.split()[1], end.split()[1]) == (end.split()[0], "begins", "ends")
    names = [line[0] for line in lines[::2]]
    both = names[names.index("b" if names[0] == "a" else "a") :]
    both = both[: 2 * min(both.count("a"), both.count("b"))]
    assert all(one != other for one, other in itertools.pairwise(both))


def test_a_process_that_ends_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    clock = VirtualClock()
    first, second = (StepTurn(tmp_path, clock.now, clock.advance) for _ in range(2))
    first.__enter__()
    with second:
        assert MAX_WAIT_SECONDS <= clock.now() <= MAX_WAIT_SECONDS + 2 * LONGEST_PAUSE_SECONDS
    expired = clock.now()
    for _ in range(3):
        with second:
            assert clock.now() == expired, "a process that hangs delays another one only once"
    first.close()
    with second:
        assert clock.now() == expired
    third = StepTurn(tmp_path, clock.now, clock.advance)
    with third, second:
        assert clock.now() >= expired + MAX_WAIT_SECONDS, "it waits again after the lock was free"
    second.close()
    third.close()
