"""`chairlift serve` of any checkout in a process of its own, with the CPU time and the memory that a call costs it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from chairlift.server.access.keys import key_record, new_secret, to_toml

ENGINE_MODULE: Final = "chairlift.engine.process.engine_process"
ROLES: Final = ("http", "engine")
SAMPLE_SECONDS: Final = 0.5
STOP_SECONDS: Final = 20.0
"""Seconds after SIGTERM, and again after a second SIGTERM, until the server is killed."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of a process in bytes.

    Attributes:
        pss: all resident pages; a page that several processes share counts in equal parts.
        private: the part that is not mapped from files. The share of a library changes whenever a program elsewhere on
            the machine maps it, so slopes are computed from this part.
    """

    pss: int = 0
    private: int = 0

    def __add__(self, other: ProcessMemory) -> ProcessMemory:
        return ProcessMemory(self.pss + other.pss, self.private + other.private)


def read_memory(pid: int) -> ProcessMemory:
    """The memory of a process now."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    sizes = {name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
    return ProcessMemory(sizes["Pss"], sizes["Pss_Anon"] + sizes["Pss_Shmem"])


@dataclass(slots=True)
class Usage:
    """What the two processes of a server have used during a block.

    Attributes:
        cpu_seconds: by role. That of the engine contains child processes of the server that have ended.
        memory_growth: by role, the largest private memory in the block minus that at its start, in bytes. A restarted
            engine is compared with the engine at the start.
        engine_restarts: how many times an engine process has replaced another one.
    """

    cpu_seconds: dict[str, float] = field(default_factory=dict)
    memory_growth: dict[str, int] = field(default_factory=dict)
    engine_restarts: int = 0

    def figures(self) -> dict[str, float]:
        """The figures by name, for JSON."""
        cpu = {f"{role}_cpu_s": round(self.cpu_seconds[role], 3) for role in ROLES}
        memory = {f"{role}_memory_mib": round(self.memory_growth[role] / 2**20, 1) for role in ROLES}
        return {**cpu, **memory, "engine_restarts": self.engine_restarts}


class ServerProcess:
    """A running server.

    Args:
        options: options of `chairlift serve`.
        python: the interpreter of the checkout that serves; None for that of this process.

    Raises:
        SystemExit: the server has ended before it was ready. The message is its output.

    Attributes:
        url: the address without /v1.
        log_lines: the lines that the server has written to standard error.
    """

    def __init__(self, *options: str, python: str | None = None) -> None:
        command = [python or sys.executable, "-m", "chairlift", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment(python))
        self.log_lines: list[str] = []
        self.url = self._wait_until_ready()
        threading.Thread(target=self._read_log, daemon=True).start()  # A full pipe would block the server.
        self._front = psutil.Process(self._process.pid)

    def _wait_until_ready(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log_lines.append(line)
            if found := re.search(r"ready in \S+ s: (\S+)/v1", line):
                return found[1]
        raise SystemExit("".join(self.log_lines))

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        self.log_lines += self._process.stderr

    def engine(self) -> psutil.Process | None:
        """The newest engine process; None while there is none."""
        engines = []
        for child in self._front.children():
            with contextlib.suppress(psutil.Error):
                if ENGINE_MODULE in child.cmdline():
                    engines.append(child)
        return max(engines, key=lambda child: child.create_time(), default=None)

    def cpu_seconds(self) -> dict[str, float]:
        """The CPU seconds of both processes so far."""
        front, engine = self._front.cpu_times(), self.engine()
        spent = front.children_user + front.children_system
        with contextlib.suppress(psutil.Error):
            if engine is not None:
                spent += engine.cpu_times().user + engine.cpu_times().system
        return {"http": front.user + front.system, "engine": spent}

    def private_bytes(self) -> dict[str, int]:
        """The private memory of both processes, or of one while there is no engine."""
        engine = self.engine()
        processes = {"http": self._front.pid, **({} if engine is None else {"engine": engine.pid})}
        found = {}
        for role, pid in processes.items():
            with contextlib.suppress(OSError, KeyError):  # It has ended.
                found[role] = read_memory(pid).private
        return found

    @contextlib.contextmanager
    def measured(self) -> Iterator[Usage]:
        """Yield a record that has the usage of the block after its end."""
        usage, stop = Usage(), threading.Event()
        cpu, memory = self.cpu_seconds(), self.private_bytes()
        largest, pids = dict(memory), {process.pid for process in (self.engine(),) if process is not None}

        def sample() -> None:
            for role, size in self.private_bytes().items():
                largest[role] = max(largest.get(role, 0), size)
            if (engine := self.engine()) is not None:
                pids.add(engine.pid)

        def watch() -> None:
            while not stop.wait(SAMPLE_SECONDS):
                sample()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield usage
        finally:
            stop.set()
            thread.join()
            sample()
            usage.cpu_seconds = {role: spent - cpu[role] for role, spent in self.cpu_seconds().items()}
            usage.memory_growth = {role: largest.get(role, 0) - memory.get(role, 0) for role in ROLES}
            usage.engine_restarts = max(0, len(pids) - 1)

    def close(self) -> None:
        """Stop the server. A second SIGTERM ends it although requests are unfinished."""
        for _ in range(2):
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
                return
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def server_process(*options: str, python: str | None = None) -> Iterator[ServerProcess]:
    """Run a server for the duration of a block."""
    server = ServerProcess(*options, python=python)
    try:
        yield server
    finally:
        server.close()


def write_keys(path: Path, names: Sequence[str]) -> dict[str, str]:
    """Write a file with one API key for each name, and return the secret of each name."""
    secrets = {name: new_secret() for name in names}
    path.write_text("\n\n".join(to_toml(key_record(secret, name=name)) for name, secret in secrets.items()))
    return secrets


@dataclass(frozen=True, slots=True)
class Checkout:
    """The code that an interpreter serves: its version and its commit, with a plus sign if files differ from it."""

    version: str
    commit: str


def checkout_of(python: str | None = None) -> Checkout:
    """The code that an interpreter imports."""
    code = "import chairlift.version as v; print(v.__version__, v.__file__)"
    command = [python or sys.executable, "-c", code]
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment(python)).stdout
    version, file = found.split(maxsplit=1)
    git = ["git", "-C", str(Path(file.strip()).parent), "describe", "--always", "--dirty=+", "--exclude", "*"]
    described = subprocess.run(git, capture_output=True, text=True)
    return Checkout(version, described.stdout.strip() or "unknown")


def _environment(python: str | None) -> dict[str, str]:
    """The environment of a server: PYTHONPATH would import the code of this checkout in that of another one."""
    environment = dict(os.environ)
    if python is not None:
        environment.pop("PYTHONPATH", None)
    return environment
