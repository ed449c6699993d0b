"""Other users of the machine: those with a login or a process, without this user and accounts of the system."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from chairlift.system.other_users import is_readable_by_others, other_users


def account(uid: int, name: str, shell: str = "/bin/sh") -> SimpleNamespace:
    return SimpleNamespace(pw_uid=uid, pw_name=name, pw_shell=shell)


def running(uid: int | None, name: str) -> SimpleNamespace:
    uids = None if uid is None else SimpleNamespace(real=uid)
    return SimpleNamespace(info={"uids": uids, "username": name})


def test_users_with_a_login_or_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = [
        account(0, "root"),
        account(33, "www-data"),
        account(1000, "ann"),
        account(1001, "me"),
        account(1002, "backup", "/usr/sbin/nologin"),
        account(1003, "git", ""),
        account(65534, "nobody"),
    ]
    processes = [running(0, "root"), running(1001, "me"), running(2001, "directory-user"), running(None, "?")]
    monkeypatch.setattr(os, "getuid", lambda: 1001)
    monkeypatch.setattr(pwd, "getpwall", lambda: accounts)
    monkeypatch.setattr(psutil, "process_iter", lambda _attributes: iter(processes))
    assert other_users() == ["ann", "directory-user"]
    processes.append(running(1002, "backup"))
    assert other_users() == ["ann", "backup", "directory-user"]


def test_a_file_is_readable_by_others_with_its_mode_and_those_of_its_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = tmp_path / "folder", tmp_path / "folder" / "file"
    folder.mkdir()
    monkeypatch.setattr(Path, "parents", property(lambda _path: (folder,)))  # Those of pytest are private.
    assert not is_readable_by_others(file)
    file.touch()
    for file_mode, folder_mode, is_readable in (
        (0o600, 0o755, False),
        (0o622, 0o755, False),
        (0o644, 0o700, False),
        (0o644, 0o755, True),
        (0o640, 0o750, True),
    ):
        file.chmod(file_mode)
        folder.chmod(folder_mode)
        assert is_readable_by_others(file) == is_readable, (file_mode, folder_mode)
