"""Other users of the machine: those with a login or a process, without this user and accounts of the system."""

from __future__ import annotations

import os
import pwd
from types import SimpleNamespace

import psutil
import pytest

from chairlift.cluster.local_cluster import other_users


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
