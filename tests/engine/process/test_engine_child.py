"""The description of the exit of an engine process, and its last message before it is ready."""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from chairlift import EngineConfig
from chairlift.engine.process import engine_child
from chairlift.engine.process.engine_child import EngineChild, wait_for_facts
from chairlift.engine.process.watchdog import Watchdog
from chairlift.engine.process.wire import EngineFailed, FrontLink
from chairlift.errors import ConfigError
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


def test_a_process_has_not_ended_before_its_last_messages_have_arrived_or_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_child, "LAST_MESSAGE_SECONDS", math.inf)
    child = EngineChild(EngineConfig("no-model"), SLEEPS, logging.WARNING)
    try:
        child.kill()
        child.exit_description()
        assert child.has_ended
        monkeypatch.setattr(FrontLink, "has_sender", True)
        assert child.has_exited
        assert not child.has_ended
        monkeypatch.setattr(engine_child, "LAST_MESSAGE_SECONDS", 0.0)
        assert child.has_ended
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


class EndingChild:
    """A process that has exited, whose last message arrives after some waits for it, with the end of its connection."""

    def __init__(self, num_waits: int) -> None:
        self.link = self
        self.num_waits = num_waits

    @property
    def has_ended(self) -> bool:
        return self.num_waits <= 0

    def receive(self) -> EngineFailed | None:
        return EngineFailed("the reason", "ConfigError") if self.has_ended else None

    def wait(self, _seconds: float) -> bool:
        self.num_waits -= 1
        return False


@pytest.mark.parametrize("num_waits", [1, 5])
def test_the_last_message_is_read_before_the_exit_is_reported(num_waits: int) -> None:
    child: Any = EndingChild(num_waits)
    with pytest.raises(ConfigError, match="the reason"):
        wait_for_facts(child, Watchdog(60.0))
