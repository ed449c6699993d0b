"""Files that callers name are read within bounds, and output files are checked before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import LLM, EngineConfig
from chairlift.errors import ConfigError
from chairlift.system.input_files import read_bytes, read_text
from chairlift.system.output_files import check_writable, reopen


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


def test_the_check_leaves_files_unchanged(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    for path in (old, new):
        check_writable("event_log", path)
    assert old.read_text() == "kept"
    assert not new.exists()


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would block until it has a reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable("event_log", pipe)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no/log", "event_log={folder}/no/log: No such file or directory; create the folder {folder}/no, or use"),
        ("", "event_log={folder}: Is a directory; use a file in this folder"),
        ("file/log", "event_log={folder}/file/log: Not a directory; use a file that can be written"),
        ("x" * 300, "File name too long; use a file that can be written"),
    ],
)
def test_errors_have_the_reason_and_the_advice(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        check_writable("event_log", tmp_path / path)
    assert message.format(folder=tmp_path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_without_write_permission_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch(0o400)
    with pytest.raises(ConfigError, match="Permission denied; use a file that can be written"):
        check_writable("event_log", path)


@pytest.mark.parametrize("field", ["event_log", "record_trace"])
def test_files_are_checked_before_the_model_is_loaded(
    field: str, tiny_model_dir: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "chairlift.engine.startup.loaded_model.resolve_model", lambda _: pytest.fail("looks for the model")
    )
    config = EngineConfig(model=str(tiny_model_dir("llama")), **{field: tmp_path / "no" / "log"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{field}=.*create the folder"):
        LLM.from_config(config)


def test_a_pipe_is_not_opened_again(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pipe.open("w") as file:
        os.close(reader)
        assert reopen("event_log", file) == ""
