"""CPU time of threads and child processes is charged to the account that they work for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from chairlift.system.cpu_account import charge_cpu_time_to, charge_process, cpu_charge, process_cpu_seconds

BUSY = "while True: pass"


def compute(seconds: float) -> None:
    started = time.thread_time()
    while time.thread_time() < started + seconds:
        pass


def test_a_block_is_charged_with_what_it_charges_and_its_own_time_also_if_it_raises() -> None:
    charged: list[float] = []

    def work() -> None:
        with charge_cpu_time_to(charged.append):
            cpu_charge()(5.0)
            compute(0.02)
            raise ValueError("after the work")

    with pytest.raises(ValueError, match="after the work"):
        work()
    assert charged[0] == 5.0
    assert len(charged) == 2
    assert charged[1] >= 0.02


def test_other_threads_charge_other_accounts() -> None:
    charged: list[float] = []
    with charge_cpu_time_to(charged.append):
        thread = threading.Thread(target=lambda: cpu_charge()(5.0))
        thread.start()
        thread.join()
    cpu_charge()(7.0)
    assert sum(charged) < 5.0


def test_a_process_is_charged_with_its_time_during_a_block_also_if_it_is_killed() -> None:
    charged: list[float] = []
    with subprocess.Popen([sys.executable, "-c", BUSY]) as child:
        while process_cpu_seconds(child.pid) < 0.2:
            time.sleep(0.01)
        with charge_cpu_time_to(charged.append), charge_process(child.pid):
            before = process_cpu_seconds(child.pid)
            while process_cpu_seconds(child.pid) < before + 0.1:
                time.sleep(0.01)
            child.kill()
        assert 0.1 <= charged[0] < process_cpu_seconds(child.pid) - 0.1
    assert process_cpu_seconds(child.pid) == 0.0, "it has ended"


def test_cpu_time_of_a_process_is_that_of_all_its_threads() -> None:
    thread = threading.Thread(target=compute, args=(0.1,))
    before = process_cpu_seconds(os.getpid())
    thread.start()
    thread.join()
    assert process_cpu_seconds(os.getpid()) >= before + 0.1
