"""Facts about the machine, the versions and the memory of the process that a measurement belongs to."""

from __future__ import annotations

import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from chairlift.kernels.kernel_set import find_kernel_set
from chairlift.system.cpu_topology import allowed_cpus
from chairlift.version import __version__

VECTOR_FLAGS: Final = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "sve",
)
"""The flags of /proc/cpuinfo that determine the speed of matrix products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """The machine and the versions of a process that runs an engine.

    Attributes:
        cpu: name of the CPU.
        vector_flags: the flags of VECTOR_FLAGS that the CPU has; empty if the system has no /proc/cpuinfo.
        num_cores: number of logical cores that this process may use.
        memory_bytes: memory of the whole machine.
        system: name and version of the operating system.
        num_threads: number of computing threads: the larger of torch's and the native kernels' number.
        isa: instruction set of the native kernels; None if they are not loaded.
        accelerator: name of the CUDA device; None without one.
    """

    cpu: str
    vector_flags: list[str]
    num_cores: int
    memory_bytes: int
    system: str
    num_threads: int
    isa: str | None
    accelerator: str | None
    chairlift: str
    torch: str
    python: str


def machine_facts() -> MachineFacts:
    """Read the facts about this process."""
    import torch

    model, flags = _cpu(Path("/proc/cpuinfo"))
    isa, num_threads = find_kernel_set("native").running() or (None, 0)
    return MachineFacts(
        cpu=model,
        vector_flags=flags,
        num_cores=len(allowed_cpus()),
        memory_bytes=int(psutil.virtual_memory().total),
        system=platform.platform(),
        num_threads=max(torch.get_num_threads(), num_threads),
        isa=isa,
        accelerator=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        chairlift=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
    )


def machine_caption(machine: MachineFacts, peak_rss_bytes: int | None) -> str:
    """Two lines for a caption: the machine with the peak memory of the process, and the versions."""
    memory = f"{machine.memory_bytes / (1 << 30):.0f} GiB"
    isa = "" if machine.isa is None else f" ({machine.isa})"
    rss = "" if peak_rss_bytes is None else f", peak RSS {peak_rss_bytes / (1 << 20):,.0f} MiB"
    return (
        f"{machine.cpu}{isa}, {machine.num_threads} threads on {machine.num_cores} cores, {memory}{rss}\n"
        f"chairlift {machine.chairlift}, torch {machine.torch}, Python {machine.python}"
    )


def peak_rss_bytes() -> int:
    """The maximum memory of this process so far, in bytes.

    VmHWM is preferred: the number of getrusage survives exec, so it may describe the parent process.
    """
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cpu(cpuinfo: Path) -> tuple[str, list[str]]:
    """Read the name and the vector flags of the CPU."""
    facts: dict[str, str] = {}
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip().lower(), value.strip())
    flags = set((facts.get("flags") or facts.get("features") or "").split())
    name = facts.get("model name") or platform.processor() or platform.machine()
    return name, [flag for flag in VECTOR_FLAGS if flag in flags]
