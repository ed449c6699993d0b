"""Facts of the machine: cores and NUMA nodes, other users, and amounts of memory."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from chairlift.cluster.local_cluster import other_users
from chairlift.errors import ConfigError
from chairlift.system.control_groups import ControlGroups
from chairlift.system.cpu_topology import CpuTopology, allowed_cpus, parse_cpu_list
from chairlift.system.memory_amounts import format_memory, parse_memory
from chairlift.worker.memory import available_memory, total_memory


def write(root: Path, files: dict[str, str]) -> CpuTopology:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CpuTopology(root)


@pytest.fixture
def two_sockets(tmp_path: Path) -> CpuTopology:
    """Two nodes with four cores each; CPUs 8 to 15 are the second hyperthreads of 0 to 7."""
    siblings = {f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 8},{cpu % 8 + 8}\n" for cpu in range(16)}
    return write(tmp_path, {**siblings, "node/node0/cpulist": "0-3,8-11\n", "node/node1/cpulist": "4-7,12-15\n"})


@pytest.mark.parametrize(
    ("cpus", "cores", "nodes"),
    [
        (range(16), 8, [0, 1]),
        ({0, 8}, 1, [0]),
        ({0, 9}, 2, [0]),
        (range(8, 16), 8, [0, 1]),
        ({5, 6, 13}, 2, [1]),
    ],
)
def test_hyperthreads_count_once(two_sockets: CpuTopology, cpus: set[int], cores: int, nodes: list[int]) -> None:
    assert two_sockets.num_physical_cores(cpus) == cores
    assert two_sockets.numa_nodes(cpus) == nodes


def test_cores_and_memory_of_this_machine(tmp_path: Path) -> None:
    assert CpuTopology(tmp_path).num_physical_cores({3, 4, 5}) == 3
    assert CpuTopology(tmp_path).numa_nodes({3, 4, 5}) == []
    assert 1 <= CpuTopology().num_physical_cores(allowed_cpus()) <= len(allowed_cpus())
    assert 0 < available_memory(torch.device("cpu")) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,7\n", {0, 1, 2, 7}), ("5", {5}), ("", set()), ("\n", set()), ("a-b", set()), ("1,,2", set())],
)
def test_lists_of_cpus_are_parsed(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 << 30),
        ("4gib", 4 << 30),
        (" 1.5 GB ", 1_500_000_000),
        ("800MB", 800_000_000),
        ("512 MiB", 512 << 20),
        ("7KiB", 7168),
        ("2KB", 2000),
        ("1TiB", 1 << 40),
        ("1TB", 10**12),
        ("0.5KiB", 512),
        ("1073741824", 1 << 30),
        ("12B", 12),
        (9007199254740993, 9007199254740993),
    ],
)
def test_parse_memory(text: str | int, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4 GiBs", "-1GiB", "4,5GB", "0", "0.1B", "1e9", "inf", 0, -5, True, "4G"])
def test_parse_memory_rejects_invalid_amounts(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"memory must be .* such as 4GiB") as error:
        parse_memory(text)
    assert repr(text) in str(error.value)


def test_format_memory() -> None:
    assert [format_memory(n) for n in (12, 1536, 3 << 20, 5 << 30, 1 << 41)] == [
        "12 bytes",
        "1.5 KiB",
        "3 MiB",
        "5 GiB",
        "2 TiB",
    ]


def test_memory_is_bounded_by_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "memory_available", lambda _self: 12345)
    monkeypatch.setattr(ControlGroups, "memory_limit", lambda _self: 23456)
    assert available_memory(torch.device("cpu")) == 12345
    assert total_memory(torch.device("cpu")) == 23456


def test_control_group_limits_above_the_system_memory_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "memory_limit", lambda _self: 1 << 55)
    assert total_memory(torch.device("cpu")) == psutil.virtual_memory().total
