"""The physical cores and NUMA nodes of the CPUs that this process may use, as Linux describes them in /sys."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from chairlift.system.input_files import read_or_empty


@dataclass(frozen=True, slots=True)
class CpuTopology:
    """The topology of the CPUs of a machine.

    Args:
        folder: the folder with the descriptions of CPUs and nodes.
    """

    folder: Path = Path("/sys/devices/system")

    def num_physical_cores(self, cpus: Collection[int]) -> int:
        """The number of physical cores among logical CPUs: hyperthreads of one core count once. A CPU without a
        description counts as a core."""
        return len({self._siblings(cpu) for cpu in cpus})

    def numa_nodes(self, cpus: Collection[int]) -> list[int]:
        """The NUMA nodes that contain one of the CPUs, in ascending order; empty without descriptions."""
        lists = self.folder.glob("node/node*/cpulist")
        found = [path.parent.name for path in lists if not parse_cpu_list(read_or_empty(path)).isdisjoint(cpus)]
        return sorted(int(name.removeprefix("node")) for name in found)

    def _siblings(self, cpu: int) -> frozenset[int]:
        """The logical CPUs of the core of a CPU."""
        path = self.folder / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        return frozenset(parse_cpu_list(read_or_empty(path))) or frozenset((cpu,))


def allowed_cpus() -> set[int]:
    """The logical CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of the Linux kernel, such as "0-3,8"; an empty set for any other text."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        try:
            cpus.update(range(int(first), int(last or first) + 1))
        except ValueError:
            return set()
    return cpus
