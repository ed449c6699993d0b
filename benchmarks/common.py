"""What the benchmarks of this folder share: options, rounds, a server and its client, the machine, results and tables.

Every benchmark prints the machine and its tables, or with `--json` one line of JSON with the same record.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx


@contextmanager
def serve(*options: str) -> Iterator[str]:
    """Run `chairlift serve` on a free port in a process, and yield its URL without /v1.

    Raises:
        SystemExit: the server has ended before it was ready. The message is its output.
    """
    command = [sys.executable, "-m", "chairlift", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"ready in \S+ s: (\S+)/v1", line):
                # A full pipe would block the server.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield found[1]
                break
        else:
            raise SystemExit("".join(lines))
    finally:
        process.terminate()
        process.wait(60)


@dataclass(slots=True)
class StreamedAnswer:
    """The times of a streamed answer, in seconds of `time.perf_counter`.

    Attributes:
        chunk_times: the arrival of each chunk with text.
        failure: the reason why the answer is incomplete; None if it is complete.
    """

    sent: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.chunk_times[0] - self.sent if self.chunk_times else None


async def stream_completion(client: httpx.AsyncClient, body: dict[str, Any], answer: StreamedAnswer) -> None:
    """Send a streamed completion and record it. Errors set `answer.failure`."""
    answer.sent = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            if response.status_code != 200:
                answer.failure = (await response.aread()).decode(errors="replace")
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line.startswith("data: "):
                    answer.chunk_times.append(time.perf_counter())
        answer.failure = "the stream has ended without [DONE]"
    except httpx.HTTPError as error:
        answer.failure = repr(error)


def bearer_client(url: str, secret: str, timeout: float = 120.0) -> httpx.AsyncClient:
    """A client of one API key with any number of connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


def first_line(doc: str | None) -> str:
    """The first line of the docstring of a script, for `--help`."""
    return (doc or "").partition("\n")[0]


def parse_integers(text: str) -> list[int]:
    """Parse integers separated by commas; for `argparse`."""
    return [int(part) for part in text.split(",")]


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """How many times as fast each round is as the same round of the base."""
    return [other / own for own, other in zip(seconds, base, strict=True)]
