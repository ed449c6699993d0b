"""How much memory there is, and how people write it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from chairlift.errors import ConfigError

if TYPE_CHECKING:
    import torch

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_MEMORY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_memory(text: str | int, field: str = "memory") -> int:
    """Bytes: "4GiB", "1.5 GB", "1048576", 1048576. Units are KB to TB (powers of 1000) and KiB to TiB (of 1024).

    Args:
        field: that the amount was given for, to be named in an error.

    Raises:
        ConfigError: it is not such a text, or less than one byte.
    """
    match = None if isinstance(text, bool) else _MEMORY.fullmatch(str(text))
    unit = UNITS.get((match[2] or "B").upper()) if match else None
    num_bytes = int(Decimal(match[1]) * unit) if match and unit else 0
    if num_bytes < 1:
        raise ConfigError(
            f"{field} must be a positive amount such as 4GiB, 800MB or 1073741824 (bytes), got {text!r}; "
            "units: B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return num_bytes


def format_memory(num_bytes: int) -> str:
    """The amount in the largest binary unit that it fills: 1536 -> "1.5 KiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated on the device now without swapping.

    On the CPU the smaller of what the system has and of what is left in this process's control groups.
    """
    if device.type == "cuda":
        import torch

        free, _total = torch.cuda.mem_get_info(device)
        return free
    return available_host_memory()


def total_memory(device: torch.device) -> int:
    """Bytes that the device has, or the host that it is."""
    if device.type == "cuda":
        import torch

        _free, total = torch.cuda.mem_get_info(device)
        return total
    return int(psutil.virtual_memory().total)


def available_host_memory() -> int:
    """`available_memory` of the CPU, without torch."""
    system = int(psutil.virtual_memory().available)
    limit = cgroup_available()
    return system if limit is None else min(system, limit)


def cgroup_available(mount: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes left below the tightest memory limit of this process's control groups, version 1 and 2; None: no limit.

    A group is bound by its ancestors too. Page cache that the kernel would drop first counts as left.
    """
    rooms = [room for folder in _cgroup_folders(mount, process) if (room := _room(folder)) is not None]
    return min(rooms, default=None)


def _cgroup_folders(mount: Path, process: Path) -> Iterator[Path]:
    """Every group that binds this process. In a container the path may be the host's, and then only the root exists."""
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _hierarchy, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mount, mount / "unified"]
        elif "memory" in controllers.split(","):
            roots = [mount / "memory"]
        else:
            continue
        relative = Path(path.lstrip("/"))
        for root in roots:
            yield from (root / folder for folder in (relative, *relative.parents))


def _room(folder: Path) -> int | None:
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            if limit == "max":
                return None
            usage = int((folder / usage_name).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        return max(0, int(limit) - usage + int(statistics.get(cache_key, 0)))
    return None
