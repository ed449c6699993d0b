"""A standard error that cannot be written does not stop the server."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from chairlift.server.telemetry.access_log import AccessLog

FULL = Path("/dev/full")


def test_a_line_is_written_at_once_to_standard_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "stderr"
    with path.open("w") as file:
        monkeypatch.setattr(sys, "__stderr__", file)
        AccessLog("text").write("one \U0001f600")
        assert path.read_text() == "one \U0001f600\n"


def test_standard_error_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    AccessLog("text").write("nowhere")


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_standard_error_may_be_full(monkeypatch: pytest.MonkeyPatch) -> None:
    full = FULL.open("w")
    monkeypatch.setattr(sys, "__stderr__", full)
    log = AccessLog("text")
    for _ in range(3):
        log.write("lost")
    with contextlib.suppress(OSError):
        full.close()
