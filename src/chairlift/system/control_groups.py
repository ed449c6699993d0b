"""What the control groups of this process allow it: memory and CPU time, in versions 1 and 2 of Linux's interface.

A group is bound by its ancestors too, so the tightest limit counts. In a container the path of the group may be the
host's, of which only the root exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY: Final = "memory"
CPU: Final = "cpu"

MEMORY_FILES: Final = (
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of either version: limits, usage, and the line of memory.stat with the page cache that is dropped first. Beyond
memory.high the kernel slows a process down until it stands still; there is nothing to gain there."""

UNLIMITED_BYTES: Final = 1 << 60
"""Version 1 writes the largest number of pages that it can count where there is no limit."""

OOM_KILL_FILES: Final = ("memory.events", "memory.oom_control")


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The groups of a process.

    Args:
        mount: where the file systems of control groups are mounted.
        process: lists the groups, such as /proc/self/cgroup.
    """

    mount: Path = Path("/sys/fs/cgroup")
    process: Path = Path("/proc/self/cgroup")

    def memory_limit(self) -> int | None:
        """Bytes that all processes of the tightest group may use together; None: no limit."""
        return min((limit for folder in self._folders(MEMORY) for limit in _memory_limits(folder)), default=None)

    def memory_available(self) -> int | None:
        """Bytes left below the tightest limit, with the page cache that the kernel drops first; None: no limit."""
        rooms = [room for folder in self._folders(MEMORY) if (room := _memory_room(folder)) is not None]
        return min(rooms, default=None)

    def cpu_quota(self) -> float | None:
        """CPUs whose time the tightest group may use, 1.5 for 150 ms in each 100 ms; None: no limit."""
        quotas = [quota for folder in self._folders(CPU) if (quota := _cpu_quota(folder)) is not None]
        return min(quotas, default=None)

    def oom_kills(self) -> int:
        """Processes that the kernel has killed in these groups because memory was short; 0 where it does not count."""
        return sum(_oom_kills(folder) for folder in self._folders(MEMORY))

    def _folders(self, controller: str) -> Iterator[Path]:
        """Every group that binds this process with one of its controllers."""
        for line in _read(self.process).splitlines():
            _hierarchy, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers == "":
                roots = [self.mount, self.mount / "unified"]
            elif controller in controllers.split(","):
                roots = [self.mount / name for name in {controller, controllers}]
            else:
                continue
            relative = Path(path.lstrip("/"))
            for root in roots:
                yield from (root / folder for folder in (relative, *relative.parents))


def _memory_limits(folder: Path) -> list[int]:
    names = [name for limits, _usage, _cache in MEMORY_FILES for name in limits]
    limits = (_number(_read(folder / name)) for name in names)
    return [limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES]


def _memory_room(folder: Path) -> int | None:
    limits = _memory_limits(folder)
    for _names, usage_name, cache_key in MEMORY_FILES:
        usage = _number(_read(folder / usage_name))
        if limits and usage is not None:
            return max(0, min(limits) - usage + _line(folder / "memory.stat", cache_key))
    return None


def _cpu_quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    quota, period = (_number(word) for word in (*words, "")[:2])
    return quota / period if quota is not None and period else None


def _oom_kills(folder: Path) -> int:
    return sum(_line(folder / name, "oom_kill") for name in OOM_KILL_FILES)


def _line(path: Path, key: str) -> int:
    """The number of the line `key 123`; 0 where there is none."""
    pairs = (line.split() for line in _read(path).splitlines())
    return next((_number(pair[1]) or 0 for pair in pairs if len(pair) == 2 and pair[0] == key), 0)


def _number(text: str) -> int | None:
    """None for `max`, for -1 (no limit in version 1), and for what is no number."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
