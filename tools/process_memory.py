"""The memory of all processes of a server over time, and the slope of each."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
from benchmarks.server_process import ProcessMemory, read_memory

SAMPLE_SECONDS = 5.0
MIN_SAMPLES = 8
"""A process with fewer samples in a part of a run, because it ended or was started again, has no slope."""

WINDOW_SECONDS = 600.0
"""Slopes are given in bytes per window of ten minutes."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory of the processes of one role at a time in seconds, and their number."""

    time: float
    memory: ProcessMemory
    num_processes: int


@dataclass(frozen=True, slots=True)
class MemoryTrend:
    """The memory of the processes of one role in a part of a run.

    Attributes:
        slope: of the private memory, by least squares, in bytes per WINDOW_SECONDS.
    """

    role: str
    num_processes: int
    first: ProcessMemory
    last: ProcessMemory
    largest: ProcessMemory
    slope: float


def role_of(command: Sequence[str]) -> str:
    """The role of a process by its command line: the HTTP process, or the module that a child process runs."""
    module = next((word for word in command if word.startswith("chairlift.")), "")
    return module.rpartition(".")[2] or "http"


class MemoryLog:
    """Samples of the memory of a process and its descendants, by their roles. Several engines are numbered by age."""

    def __init__(self, pid: int) -> None:
        self.samples: dict[str, list[MemorySample]] = defaultdict(list)
        self._process = psutil.Process(pid)
        self._engines: list[int] = []

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Take a sample every SAMPLE_SECONDS, on a thread."""
        stop = threading.Event()

        def record() -> None:
            while not stop.wait(SAMPLE_SECONDS):
                self.sample(time.monotonic())

        thread = threading.Thread(target=record, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def sample(self, now: float) -> None:
        """Take one sample."""
        found: dict[str, list[ProcessMemory]] = defaultdict(list)
        for process in (self._process, *self._process.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError, KeyError):  # It has ended.
                found[self._role(process)].append(read_memory(process.pid))
        for role, parts in found.items():
            self.samples[role].append(MemorySample(now, sum(parts, ProcessMemory()), len(parts)))

    def _role(self, process: psutil.Process) -> str:
        role = role_of(process.cmdline())
        if role != "engine_process":
            return role
        if process.pid not in self._engines:
            self._engines.append(process.pid)
        return f"engine {self._engines.index(process.pid) + 1}"

    def trends(self, since: float) -> list[MemoryTrend]:
        """The trend of each role from a time on. Roles with fewer than MIN_SAMPLES are left out."""
        recent = {role: [each for each in samples if each.time >= since] for role, samples in self.samples.items()}
        return [
            MemoryTrend(
                role,
                max(each.num_processes for each in samples),
                samples[0].memory,
                samples[-1].memory,
                max((each.memory for each in samples), key=lambda memory: memory.private),
                slope([each.time for each in samples], [each.memory.private for each in samples]),
            )
            for role, samples in recent.items()
            if len(samples) >= MIN_SAMPLES
        ]


def slope(times: Sequence[float], sizes: Sequence[int]) -> float:
    """The slope of the line through points by least squares, in bytes per WINDOW_SECONDS."""
    mean_time, mean_size = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((each - mean_time) ** 2 for each in times)
    product = sum((each - mean_time) * (size - mean_size) for each, size in zip(times, sizes, strict=True))
    return WINDOW_SECONDS * product / spread
