"""Reads limits of control groups from files of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.system.control_groups import ControlGroups


def write(folder: Path, **files: int | str) -> None:
    """Write the files of a control group; two underscores in a name mean a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def groups(mount: Path, lines: str) -> ControlGroups:
    process = mount / "self"
    process.write_text(lines)
    return ControlGroups(mount, process)


def test_version_2_the_lowest_limit_of_all_ancestors_counts(tmp_path: Path) -> None:
    own = groups(tmp_path, "0::/pod/box\n")
    write(tmp_path / "pod", memory__max=1000, memory__current=700, memory__stat="anon 1\ninactive_file 50")
    write(tmp_path / "pod" / "box", memory__max="max", memory__current=10, memory__stat="inactive_file 0")
    assert (own.memory_limit(), own.memory_available()) == (1000, 350)
    write(tmp_path / "pod" / "box", memory__max=400, memory__current=390)
    assert (own.memory_limit(), own.memory_available()) == (400, 10)


def test_version_2_memory_high_is_a_limit(tmp_path: Path) -> None:
    own = groups(tmp_path, "0::/box\n")
    write(tmp_path / "box", memory__max="max", memory__high=600, memory__current=100, memory__stat="inactive_file 0")
    assert (own.memory_limit(), own.memory_available()) == (600, 500)
    write(tmp_path / "box", memory__max=300)
    assert (own.memory_limit(), own.memory_available()) == (300, 200)


def test_version_1_with_the_hosts_path(tmp_path: Path) -> None:
    own = groups(tmp_path, "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n")
    memory, cpu = tmp_path / "memory", tmp_path / "cpu,cpuacct"
    write(memory, memory__limit_in_bytes=5000, memory__usage_in_bytes=6000)
    write(memory, memory__stat="inactive_file 1\ntotal_inactive_file 300")
    write(cpu, cpu__cfs_quota_us=250_000, cpu__cfs_period_us=100_000)
    assert (own.memory_limit(), own.memory_available()) == (5000, 0)
    assert own.cpu_quota() == 2.5
    write(memory, memory__usage_in_bytes=4500)
    assert own.memory_available() == 800


def test_version_1_without_limits(tmp_path: Path) -> None:
    own = groups(tmp_path, "2:memory:/box\n1:cpu:/box\n")
    write(tmp_path / "memory" / "box", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5)
    write(tmp_path / "cpu" / "box", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert (own.memory_limit(), own.memory_available(), own.cpu_quota()) == (None, None, None)


@pytest.mark.parametrize(
    ("inner", "outer", "quota"),
    [("max 100000", "max 100000", None), ("150000 100000", "max 100000", 1.5), ("400000 100000", "200000 100000", 2.0)],
)
def test_version_2_cpu_time(tmp_path: Path, inner: str, outer: str, quota: float | None) -> None:
    write(tmp_path / "pod", cpu__max=outer)
    write(tmp_path / "pod" / "box", cpu__max=inner)
    assert groups(tmp_path, "0::/pod/box\n").cpu_quota() == quota


def test_oom_kills_are_counted(tmp_path: Path) -> None:
    own = groups(tmp_path, "3:memory:/box\n0::/box\n")
    assert own.oom_kills() == 0
    write(tmp_path / "box", memory__events="low 0\nhigh 3\noom 2\noom_kill 2\noom_group_kill 9")
    write(tmp_path / "memory" / "box", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1")
    assert own.oom_kills() == 3


@pytest.mark.parametrize("content", ["", "nonsense", "-5", "12 34 56", "\u0664"])
def test_files_with_other_contents_are_no_limit(tmp_path: Path, content: str) -> None:
    own = groups(tmp_path, f"0::/\nnonsense\n{content}\n")
    names = ("memory__max", "memory__high", "memory__current", "memory__stat", "cpu__max", "memory__events")
    write(tmp_path, **dict.fromkeys(names, content))
    assert (own.memory_limit(), own.memory_available(), own.oom_kills()) == (None, None, 0)


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    for own in (ControlGroups(tmp_path, tmp_path / "missing"), groups(tmp_path, "0::/somewhere\n")):
        assert (own.memory_limit(), own.memory_available(), own.cpu_quota(), own.oom_kills()) == (None, None, None, 0)
