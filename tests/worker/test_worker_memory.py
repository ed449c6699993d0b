from __future__ import annotations

import psutil
import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.system.control_groups import ControlGroups
from chairlift.system.memory_amounts import format_memory, parse_memory
from chairlift.worker.memory import available_memory, total_memory


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


def test_available_memory_of_this_machine() -> None:
    assert 0 < available_memory(torch.device("cpu")) <= psutil.virtual_memory().total


def test_memory_is_bounded_by_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "memory_available", lambda _self: 12345)
    monkeypatch.setattr(ControlGroups, "memory_limit", lambda _self: 23456)
    assert available_memory(torch.device("cpu")) == 12345
    assert total_memory(torch.device("cpu")) == 23456


def test_control_group_limits_above_the_system_memory_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlGroups, "memory_limit", lambda _self: 1 << 55)
    assert total_memory(torch.device("cpu")) == psutil.virtual_memory().total
