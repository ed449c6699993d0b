"""The limits of memory and CPU time that the Linux control groups (version 1 or 2) of this process set.

The limits of all ancestors apply too, so the lowest limit counts. In a container the listed path of the group may be
a path of the host, of which only the root exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chairlift.system.input_files import read_or_empty

MEMORY: Final = "memory"
CPU: Final = "cpu"

MEMORY_FILES: Final = (
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)
"""For each version: the files of limits and usage, and the line of memory.stat with the page cache that is dropped
first. memory.high counts as a limit because above it the kernel throttles a process almost to a halt."""

UNLIMITED_BYTES: Final = 1 << 60
"""Larger limits mean no limit: version 1 then writes the largest number of pages that it can count."""

OOM_KILL_FILES: Final = ("memory.events", "memory.oom_control")


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control groups of a process.

    Args:
        mount: the folder in which the file systems of control groups are mounted.
        process: the file that lists the groups of the process.
    """

    mount: Path = Path("/sys/fs/cgroup")
    process: Path = Path("/proc/self/cgroup")

    def memory_limit(self) -> int | None:
        """The lowest memory limit, in bytes for all processes of a group together; None if there is no limit."""
        return min((limit for folder in self._folders(MEMORY) for limit in _memory_limits(folder)), default=None)

    def memory_available(self) -> int | None:
        """Bytes below the lowest limit that are free or used by droppable page cache; None if there is no limit."""
        return min((n for folder in self._folders(MEMORY) if (n := _free_memory(folder)) is not None), default=None)

    def cpu_quota(self) -> float | None:
        """The lowest CPU quota, in CPUs: 1.5 for 150 ms in each 100 ms; None if there is no limit."""
        return min((quota for folder in self._folders(CPU) if (quota := _cpu_quota(folder)) is not None), default=None)

    def oom_kills(self) -> int:
        """The number of processes in these groups that the kernel killed for lack of memory; 0 if it is not counted."""
        return sum(_oom_kills(folder) for folder in self._folders(MEMORY))

    def _folders(self, controller: str) -> Iterator[Path]:
        """The folder of each group whose limits for the controller apply to this process."""
        for line in read_or_empty(self.process).splitlines():
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
    limits = (_number(read_or_empty(folder / name)) for name in names)
    return [limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES]


def _free_memory(folder: Path) -> int | None:
    limits = _memory_limits(folder)
    for _names, usage_name, cache_key in MEMORY_FILES:
        usage = _number(read_or_empty(folder / usage_name))
        if limits and usage is not None:
            return max(0, min(limits) - usage + _line(folder / "memory.stat", cache_key))
    return None


def _cpu_quota(folder: Path) -> float | None:
    words = read_or_empty(folder / "cpu.max").split() or [
        read_or_empty(folder / "cpu.cfs_quota_us").strip(),
        read_or_empty(folder / "cpu.cfs_period_us").strip(),
    ]
    quota, period = (_number(word) for word in (*words, "")[:2])
    return quota / period if quota is not None and period else None


def _oom_kills(folder: Path) -> int:
    return sum(_line(folder / name, "oom_kill") for name in OOM_KILL_FILES)


def _line(path: Path, key: str) -> int:
    """The number in the line `key number`; 0 if there is no such line."""
    pairs = (line.split() for line in read_or_empty(path).splitlines())
    return next((_number(pair[1]) or 0 for pair in pairs if len(pair) == 2 and pair[0] == key), 0)


def _number(text: str) -> int | None:
    """The number in a file; None for `max`, for -1 (no limit in version 1) and for any other text."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None
