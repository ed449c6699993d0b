"""The description of the exit of an engine process."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

import pytest

from chairlift import EngineConfig
from chairlift.engine.process.engine_child import EngineChild
from chairlift.system.child_process import ChildProcess
from chairlift.system.control_groups import ControlGroups

SLEEPS = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.mark.parametrize(
    ("limit", "num_oom_kills", "reason"),
    [
        (None, 0, "SIGKILL: out of memory?"),
        (300 << 20, 0, "SIGKILL: out of memory, where its control group allows 300 MiB?"),
        (None, 1, "SIGKILL: out of memory; lower kv_cache_memory_bytes"),
        (
            300 << 20,
            1,
            "SIGKILL: out of memory, where its control group allows 300 MiB; "
            "lower kv_cache_memory_bytes or raise that limit",
        ),
    ],
)
def test_a_kill_is_described_with_the_memory_limit_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, num_oom_kills: int, reason: str
) -> None:
    counts = iter((7, 7 + num_oom_kills))
    monkeypatch.setattr(ControlGroups, "oom_kills", lambda _self: next(counts))
    monkeypatch.setattr(ControlGroups, "memory_limit", lambda _self: limit)
    child = EngineChild(EngineConfig("no-model"), SLEEPS, logging.WARNING)
    try:
        child.kill()
        assert child.exit_description() == reason
    finally:
        child.close(0.0)


def test_a_process_that_cannot_be_configured_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    processes: list[ChildProcess] = []

    def send(process: ChildProcess, _content: bytes) -> None:
        assert process.pid is not None
        processes.append(process)
        raise BrokenPipeError

    monkeypatch.setattr(ChildProcess, "send", send)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(BrokenPipeError):
        EngineChild(EngineConfig("no-model"), SLEEPS, logging.WARNING)
    assert [process.pid for process in processes] == [None]
    assert not list(tmp_path.iterdir())
