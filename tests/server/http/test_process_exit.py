"""A guard process that ends is replaced, and signals are handled while none runs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from chairlift.server.http.process_exit import FORCED_EXIT_SECONDS, MAX_GUARD_RESTARTS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no guard processes on Windows")

GUARDED = """
import logging, signal, time
from chairlift.server.http.process_exit import ProcessExit

logging.basicConfig()
signal.signal(signal.SIGTERM, lambda *_: print("signal", flush=True))
exit = ProcessExit(drain_timeout=60.0)
print("ready", flush=True)
while True:
    time.sleep(1)
"""
SECONDS = 20.0


class GuardedProcess:
    """A process with a guard process, which prints a line for each SIGTERM and continues."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output: list[str] = []
        self.errors: list[str] = []
        for pipe, lines in ((process.stdout, self.output), (process.stderr, self.errors)):
            assert pipe is not None
            threading.Thread(target=lines.extend, args=(pipe,), daemon=True).start()

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, (self.output, self.errors)
            time.sleep(0.01)

    def guards(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def warnings(self, text: str) -> int:
        return sum(text in line for line in self.errors)

    def kill_guard(self) -> None:
        (guard,) = self.guards()
        guard.kill()
        self.wait_for(lambda: guard not in self.guards())


@pytest.fixture
def guarded() -> Iterator[GuardedProcess]:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-u", "-c", GUARDED], stdout=pipe, stderr=pipe, text=True)
    found = GuardedProcess(process)
    try:
        found.wait_for(lambda: "ready\n" in found.output and found.guards())
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_a_guard_process_that_is_killed_is_replaced_with_one_warning(guarded: GuardedProcess) -> None:
    guarded.kill_guard()
    guarded.wait_for(lambda: guarded.warnings("ended (exit status -9) and is started again") == 1)
    guarded.wait_for(lambda: len(guarded.guards()) == 1)
    for number in (1, 2):
        guarded.process.send_signal(signal.SIGTERM)
        guarded.wait_for(lambda number=number: guarded.output.count("signal\n") == number)
    assert guarded.process.wait(FORCED_EXIT_SECONDS + SECONDS) == -signal.SIGKILL, "the new guard process kills it"
    guarded.wait_for(lambda: guarded.warnings("the guard process kills it (exit status 137)"))
    assert guarded.warnings("WARNING") == 1
    assert not guarded.warnings("BrokenPipeError")
    assert not guarded.warnings("Traceback")


def test_a_signal_without_a_guard_process_is_handled_quietly(guarded: GuardedProcess) -> None:
    for _ in range(MAX_GUARD_RESTARTS + 1):
        guarded.wait_for(lambda: len(guarded.guards()) == 1)
        guarded.kill_guard()
    guarded.wait_for(lambda: guarded.warnings("the guard process cannot be started (it has ended 4 times)"))
    guarded.process.send_signal(signal.SIGTERM)
    guarded.wait_for(lambda: "signal\n" in guarded.output)
    assert len(guarded.errors) == guarded.warnings("WARNING") == MAX_GUARD_RESTARTS + 1
    assert guarded.guards() == []
