"""The description of the exit of an engine process."""

from __future__ import annotations

import logging
import sys

import pytest

from chairlift import EngineConfig
from chairlift.engine.process.engine_child import EngineChild
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
