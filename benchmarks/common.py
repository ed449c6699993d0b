"""What the benchmarks of this folder share: options, rounds, a server and its client, the machine, results and tables.

`print_result` prints the machine and the tables of a benchmark, or with `--json` one line of JSON with the same record.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, TypeVar

import httpx
from benchmarks.server_process import server_process
from rich.console import Console, RenderableType
from rich.table import Table

from chairlift.lab.bench.machine import machine_caption, machine_facts

Measured = TypeVar("Measured")

# -- rounds --------------------------------------------------------------------------------------------------------


def run_interleaved(
    arms: Mapping[str, Callable[[], Measured]], rounds: int, *, num_warmups: int = 1
) -> dict[str, list[Measured]]:
    """Run each arm once in every round, in rotating order, so that changes of the machine's speed affect all alike.

    Args:
        num_warmups: rounds before them that are not counted.
    """
    names, results = list(arms), {name: list[Measured]() for name in arms}
    for number in range(-num_warmups, rounds):
        for index in range(len(names)):
            name = names[(index + number) % len(names)]
            found = arms[name]()
            if number >= 0:
                results[name].append(found)
        if number >= 0:
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return results


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio of each round to the same round of the base."""
    return [own / other for own, other in zip(values, base, strict=True)]


# -- results -------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float], digits: int = 3) -> str:
    """The median and the range of the rounds, for a table."""
    return f"{median(values):.{digits}g} ({min(values):.{digits}g} to {max(values):.{digits}g})"


def results_table(results: Mapping[str, Sequence[Mapping[str, float]]], title: str = "") -> Table:
    """A table with a column for each system, and the median and the range of each value over the rounds; empty for
    values that a system does not have."""
    table = Table("", *results, title=title or None)
    for key in dict.fromkeys(key for rows in results.values() for key in rows[0]):
        shown = (spread([row[key] for row in rows]) if key in rows[0] else "" for rows in results.values())
        table.add_row(key, *shown)
    return table


def print_result(
    benchmark: str,
    options: Mapping[str, Any],
    results: Any,
    parts: Sequence[RenderableType],
    *,
    as_json: bool,
    width: int = 120,
) -> None:
    """Print the machine, the options (with the seed) and the tables, or one line of JSON with the results."""
    machine = machine_facts()
    chosen = {name: value for name, value in options.items() if name != "json"}
    if as_json:
        record = {"benchmark": benchmark, "machine": asdict(machine), "options": chosen, "results": results}
        print(json.dumps(record, default=str))
        return
    console = Console(width=width)
    console.print(machine_caption(machine, None))
    console.print(f"instruction sets: {', '.join(machine.vector_flags)}; {machine.system}")
    console.print(", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None))
    for part in parts:
        console.print(part)


# -- a server and its client ---------------------------------------------------------------------------------------


@contextmanager
def serve(*options: str) -> Iterator[str]:
    """Run `chairlift serve` on a free port in a process, and yield its URL without /v1.

    Raises:
        SystemExit: the server has ended before it was ready. The message is its output.
    """
    with server_process(*options) as server:
        yield server.url


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
