"""The number of threads of the kernels."""

from __future__ import annotations

import logging

from chairlift.errors import ConfigError
from chairlift.kernels.choice import KernelChoice
from chairlift.kernels.kernel_set import MAX_THREADS, find_kernel_set
from chairlift.system.control_groups import ControlGroups
from chairlift.system.cpu_topology import CpuTopology, allowed_cpus

logger = logging.getLogger("chairlift")


def default_num_threads() -> int:
    """The number of physical cores that this process may use, within the CPU quota of its control groups, rounded down.

    Two hyperthreads share the vector units of a core, so a second thread of the kernels gains nothing and waits for the
    first one. With more threads than the quota all threads are stopped for the rest of every period, in the middle of a
    step. The fraction of a CPU that remains is for the HTTP process.
    """
    cpus = allowed_cpus()
    num_cores = CpuTopology().num_physical_cores(cpus)
    quota = ControlGroups().cpu_quota()
    num_threads = min(num_cores, MAX_THREADS) if quota is None else min(num_cores, max(1, int(quota)), MAX_THREADS)
    if quota is not None and quota < num_cores:
        logger.info("num_threads=%d: the control group allows %.3g of %d CPUs", num_threads, quota, len(cpus))
    elif num_threads < len(cpus):
        logger.info("num_threads=%d: physical cores, which have %d hyperthreads", num_threads, len(cpus))
    return num_threads


def set_threads(num_threads: int | None, choice: KernelChoice) -> int:
    """Set the number of threads of the kernels; returns as `KernelSet.set_num_threads`."""
    if num_threads is None:
        num_threads = default_num_threads()
    if num_threads > MAX_THREADS:
        raise ConfigError(f"num_threads={num_threads} exceeds the limit of {MAX_THREADS} threads")
    if num_threads > (num_cpus := len(allowed_cpus())):
        logger.warning(
            f"num_threads={num_threads} exceeds the {num_cpus} CPUs of this process, so threads wait for each other in "
            f"each step: set num_threads to at most {num_cpus}, or leave it out"
        )
    num_callers = find_kernel_set(choice.kernels).set_num_threads(num_threads)
    if num_callers > 1 and len(nodes := CpuTopology().numa_nodes(allowed_cpus())) > 1:
        logger.warning(
            f"the CPUs of this process are on {len(nodes)} NUMA nodes ({', '.join(map(str, nodes))}), and weights are "
            "not placed on the node that reads them: start one engine on each node (numactl --cpunodebind=0 "
            "--membind=0), or distribute the memory of one engine (numactl --interleave=all)"
        )
    return num_callers
