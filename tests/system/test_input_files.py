"""Files that callers name are read within bounds, and only if they are regular files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chairlift.system.input_files import read_bytes, read_text


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("é", encoding="utf-8")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_text(link) == "é"
    assert read_bytes(file, max_bytes=2) == "é".encode()
    with pytest.raises(OSError, match="has more than 1 bytes"):
        read_bytes(file, max_bytes=1)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="invalid start byte"):
        read_text(file)


def test_pipes_devices_and_folders_are_rejected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="is not a regular file"):
            read_bytes(path)
    for path in (tmp_path, tmp_path / "missing", Path("a\0b"), Path("\ud800")):
        with pytest.raises(OSError):  # noqa: PT011 - the reason is that of the system
            read_bytes(path)
