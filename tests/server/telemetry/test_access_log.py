"""On a full disk, lines of a log are dropped and counted, and this is reported once."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from chairlift.errors import ConfigError
from chairlift.server.telemetry.access_log import AccessLog

FULL = Path("/dev/full")

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_lines_are_appended_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n")
    log = AccessLog("text", path)
    log.write("one \U0001f600")
    assert path.read_text() == "before\none \U0001f600\n", "at once, without a buffer"
    log.write("\ud800")
    log.close()
    assert path.read_text().splitlines()[2:] == ["\\ud800"]
    log.write("after the end")
    assert len(path.read_text().splitlines()) == 3


def test_a_full_disk_is_reported_once_and_lost_lines_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = AccessLog("text", tmp_path / "log")
    usable = log._file
    for spell in range(2):
        log._file = io.FileIO(FULL, "w")
        for _ in range(50):
            log.write("lost")
        log._file.close()
        log._file = usable
        log.write(f"written {spell}")
        log.write("too")
    log.close()
    name = f"access_log={tmp_path / 'log'}"
    full = f"{name}: cannot be written (No space left on device); lines are dropped until it can be written"
    again = f"{name}: can be written again; 50 lines were lost"
    assert warnings(caplog) == [full, again, full, again]
    assert (tmp_path / "log").read_text().split("\n") == ["written 0", "too", "written 1", "too", ""]


def test_close_reports_lost_lines(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("text", FULL)
    for _ in range(3):
        log.write("lost")
    log.close()
    assert warnings(caplog)[1:] == ["access_log=/dev/full: is closed; 3 lines were lost"]


def test_standard_error_may_be_missing_or_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    AccessLog("text", None).write("nowhere")
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        log = AccessLog("text", None)
        log.write("lost")
        assert log.num_lost == 1
        log.close()


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"access_log=.*: Is a directory; use a file in this folder"):
        AccessLog("text", tmp_path)
