"""`chairlift serve` in separate processes, with their memory and descriptors."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from support.plain_http import NO_TLS
from support.waiting import AMPLE_SECONDS

COMMAND: Final = (sys.executable, "-m", "chairlift", "serve", "--port", "0")
FAKE_COMMAND: Final = (sys.executable, str(Path(__file__).with_name("chairlift_with_fake_engine.py")), *COMMAND[3:])
"""A server with a fake engine, whose process does not import torch."""


@dataclass(slots=True)
class Served:
    """A running server.

    Attributes:
        stderr_lines: the lines that it has written to standard error.
    """

    url: str
    process: subprocess.Popen[str]
    stderr_lines: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)

    def processes(self) -> list[psutil.Process]:
        """Return the HTTP process, the engine process and their child processes."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def resident_bytes(self) -> list[int]:
        return [process.memory_info().rss for process in self.processes()]

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}{path}", timeout=AMPLE_SECONDS, verify=NO_TLS).raise_for_status().json()

    def num_unfinished(self, model: str) -> int:
        """The number of prompts in progress on the engine of a model."""
        count: int = self.get(f"/v1/engine?model={model}")["status"]["num_unfinished"]
        return count

    def metric(self, name: str) -> float:
        """Return the sum of a counter in /metrics over all labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=AMPLE_SECONDS, verify=NO_TLS).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


def as_options(options: Mapping[str, Any]) -> list[str]:
    """Convert keyword arguments to options of the command line."""
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        words += [option] if value is True else [option, str(value)]
    return words


@contextlib.contextmanager
def serve(options: Mapping[str, Any], command: Sequence[str] = COMMAND, **popen: Any) -> Iterator[Served]:
    """Run a server with these options, including `model` or `models`, and end it with SIGTERM."""
    options = dict(options)
    model = [options.pop("model")] if "model" in options else []
    words = [*command, *model, *as_options(options)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, **popen)
    served = Served("", process)
    try:
        served.url = _wait_until_ready(served)
        yield served
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=AMPLE_SECONDS) == 0, "".join(served.stderr_lines)
        served.reader.join(AMPLE_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_until_ready(served: Served) -> str:
    assert served.process.stderr is not None
    for line in served.process.stderr:
        served.stderr_lines.append(line)
        if found := re.search(r"ready in [\d.]+ s: (\S+)/v1 (?:answers|loads)", line):
            served.reader = threading.Thread(target=_read_stderr, args=(served,), daemon=True)
            served.reader.start()
            return found[1]
    raise AssertionError("".join(served.stderr_lines))


def _read_stderr(served: Served) -> None:
    assert served.process.stderr is not None
    for line in served.process.stderr:
        served.stderr_lines.append(line)
