from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.worker.memory import available_memory, cgroup_available, format_memory, parse_memory


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
def test_parse_memory_refuses(text: str | int) -> None:
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


def _write(folder: Path, **files: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_cgroup_v2_tightest_ancestor_binds(tmp_path: Path) -> None:
    process = tmp_path / "self"
    process.write_text("0::/pod/box\n")
    _write(tmp_path / "pod", memory__max=1000, memory__current=700, memory__stat="anon 1\ninactive_file 50")
    _write(tmp_path / "pod" / "box", memory__max="max", memory__current=10, memory__stat="inactive_file 0")
    assert cgroup_available(tmp_path, process) == 350
    _write(tmp_path / "pod" / "box", memory__max=400, memory__current=390)
    assert cgroup_available(tmp_path, process) == 10


def test_cgroup_v1_with_the_hosts_path(tmp_path: Path) -> None:
    process = tmp_path / "self"
    process.write_text("5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/\n")
    _write(
        tmp_path / "memory",
        memory__limit_in_bytes=5000,
        memory__usage_in_bytes=6000,
        memory__stat="inactive_file 1\ntotal_inactive_file 300",
    )
    assert cgroup_available(tmp_path, process) == 0
    _write(tmp_path / "memory", memory__usage_in_bytes=4500)
    assert cgroup_available(tmp_path, process) == 800


def test_no_cgroups(tmp_path: Path) -> None:
    assert cgroup_available(tmp_path, tmp_path / "missing") is None
    (tmp_path / "self").write_text("0::/somewhere\n")
    assert cgroup_available(tmp_path, tmp_path / "self") is None


def test_available_memory_of_this_machine() -> None:
    assert 0 < available_memory(torch.device("cpu")) <= psutil.virtual_memory().total


def test_available_memory_takes_the_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.worker.memory.cgroup_available", lambda: 12345)
    assert available_memory(torch.device("cpu")) == 12345
