"""A child process is used only while it runs, also after a kill or in a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from chairlift.grammar.checker import GrammarChecker
from chairlift.system import child_process

SECONDS = 30.0


@pytest.fixture
def process() -> Iterator[GrammarChecker]:
    checker = GrammarChecker({}, SECONDS)
    checker.start(ready_seconds=SECONDS)
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
        process.exchange(b"", seconds=SECONDS)


def test_interrupted_request_ends_the_process(process: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_file: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(child_process, "read_frame", interrupt)
    with pytest.raises(KeyboardInterrupt):
        process.exchange(b"", seconds=SECONDS)
    assert not process.is_running, "the next request would get the reply to this one"


def test_fork_does_not_use_the_process_of_its_parent(process: GrammarChecker) -> None:
    child = os.fork()
    if child == 0:
        os._exit(int(process.is_running))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert process.is_running
