"""A child process is used only while it runs, also after a kill or in a fork."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift.grammar.checker import GrammarChecker
from chairlift.system import child_process
from support.waiting import AMPLE_SECONDS


@pytest.fixture
def process() -> Iterator[GrammarChecker]:
    checker = GrammarChecker({})
    checker.start(ready_seconds=AMPLE_SECONDS)
    yield checker
    checker.close()


def test_killed_process_counts_as_ended_before_it_has_ended(
    process: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.is_running
    process.kill()
    assert process._process is not None
    monkeypatch.setattr(process._process, "poll", lambda: None)
    assert not process.is_running
    with pytest.raises(EOFError):
        process.exchange(b"", seconds=AMPLE_SECONDS)


def test_interrupted_request_ends_the_process(process: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_file: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(child_process, "read_frame", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.exchange(b"", seconds=AMPLE_SECONDS)
    assert not process.is_running, "the next request would get the reply to this one"


def test_fork_does_not_use_the_process_of_its_parent(process: GrammarChecker) -> None:
    child = os.fork()
    if child == 0:
        os._exit(int(process.is_running))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.is_running


def test_closing_in_a_fork_does_not_kill_the_process_of_its_parent(process: GrammarChecker) -> None:
    child = os.fork()
    if child == 0:
        process.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.seconds_to_compile("no grammar", AMPLE_SECONDS) < AMPLE_SECONDS


def test_kill_during_the_start_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker({})
    popen = subprocess.Popen

    def start_and_kill(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started = popen(*arguments, **options)
        checker.kill()
        return started

    monkeypatch.setattr(child_process.subprocess, "Popen", start_and_kill)
    with pytest.raises(EOFError):
        checker.start(ready_seconds=AMPLE_SECONDS)
    assert not checker.is_running
    checker.close()


def test_timer_that_expires_with_the_reply_does_not_kill_the_process(
    process: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    class RecordedTimer(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(child_process.threading, "Timer", RecordedTimer)
    process.seconds_to_compile("no grammar", AMPLE_SECONDS)
    (timer,) = timers
    timer.function()  # As a timer that had expired before it was cancelled.
    assert process.is_running
    timer.join(AMPLE_SECONDS)
    assert not timer.is_alive()


def test_process_that_is_too_slow_is_reaped_and_its_pipes_are_closed(process: GrammarChecker) -> None:
    started = process._process
    assert started is not None
    assert started.stdin is not None
    assert started.stdout is not None
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        process.exchange(b"", seconds=0.0)
    process.close()
    assert started.returncode is not None
    assert started.stdin.closed
    assert started.stdout.closed
    with pytest.raises(EOFError):
        process.exchange(b"", seconds=AMPLE_SECONDS)


def test_the_leader_of_a_process_group_ends_with_its_group() -> None:
    """Also the processes that other processes have started in it."""
    leader = child_process.ChildProcess(["sh", "-c", "read _; kill -KILL 0"], stdout=None, process_group=0)
    ends = [lambda: leader.close(), lambda: leader._process.stdin.close()]  # type: ignore[union-attr]
    for end in ends:
        leader.start()
        member = subprocess.Popen(["sleep", "60"], process_group=leader.pid)
        end()
        assert member.wait(AMPLE_SECONDS) == -signal.SIGKILL
        assert leader.wait(AMPLE_SECONDS) in (None, -signal.SIGKILL)
