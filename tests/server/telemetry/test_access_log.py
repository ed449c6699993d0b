"""A full disk does not stop the server, and is reported once."""

from __future__ import annotations

import contextlib
import logging
import resource
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
    assert path.read_text() == "before\none \U0001f600\n", "at once"
    log.write("\ud800")
    log.close()
    assert path.read_text().splitlines()[2:] == ["\\ud800"]
    log.write("after the end")
    assert len(path.read_text().splitlines()) == 3


def test_a_full_disk_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("text", tmp_path / "log")
    usable = log._file
    for spell in range(2):
        log._file = FULL.open("w")
        for _ in range(5000):
            log.write("lost")
        with contextlib.suppress(OSError):
            log._file.close()
        log._file = usable
        log.write(f"written {spell}")
        log.write("too")
    log.close()
    assert warnings(caplog) == [f"access_log={tmp_path / 'log'}: cannot be written (No space left on device)"] * 2
    assert (tmp_path / "log").read_text().split("\n") == ["written 0", "too", "written 1", "too", ""]


def test_a_line_that_a_full_disk_has_cut_is_completed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("text", tmp_path / "log")
    lines = [letter * 300_000 for letter in "ab"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        log.write(lines[0])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "log").stat().st_size == 200_000
    log.write(lines[1])
    log.close()
    assert (tmp_path / "log").read_text().splitlines() == lines
    assert len(warnings(caplog)) == 1


def test_a_log_is_closed_on_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("text", FULL)
    for _ in range(3):
        log.write("lost")
    log.close()
    assert len(warnings(caplog)) == 1


def test_standard_error_may_be_missing_or_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "__stderr__", None)
    AccessLog("text", None).write("nowhere")
    full = FULL.open("w")
    monkeypatch.setattr(sys, "__stderr__", full)
    log = AccessLog("text", None)
    log.write("lost")
    log.close()
    assert not full.closed
    assert len(warnings(caplog)) == 1
    with contextlib.suppress(OSError):
        full.close()


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"access_log=.*: Is a directory; use a file in this folder"):
        AccessLog("text", tmp_path)
