"""Physical cores and NUMA nodes, read from folders like those of Linux."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift.system.cpu_topology import CpuTopology, allowed_cpus, parse_cpu_list


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


def test_without_a_description_every_cpu_is_a_core(tmp_path: Path) -> None:
    assert CpuTopology(tmp_path).num_physical_cores({3, 4, 5}) == 3
    assert CpuTopology(tmp_path).numa_nodes({3, 4, 5}) == []


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,7\n", {0, 1, 2, 7}), ("5", {5}), ("", set()), ("\n", set()), ("a-b", set()), ("1,,2", set())],
)
def test_lists_of_cpus_are_parsed(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_this_machine_has_at_least_one_core() -> None:
    assert 1 <= CpuTopology().num_physical_cores(allowed_cpus()) <= len(allowed_cpus())
