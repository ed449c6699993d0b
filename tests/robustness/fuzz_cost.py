"""Measures what large requests cost: their time at n, 2n and 4n bytes, and the delay of a stream beside them.

    python tests/robustness/fuzz_cost.py [--endpoint chat] [--field tools] [--bytes 8000000] [--repeats 1]

For every endpoint, every field that holds a list, a string or an object is grown up to the limit of a body. Prints the
worst field of each endpoint, and as its last line JSON. Ends with status 1 if the time of a call more than grows with
its size (ratio of a doubling above 2.6), or if the p99 of the inter-token latency of the stream beside it, or the
slowest answer of /health, exceeds 100 ms.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from cost_cases import PATHS, Case, all_cases
from rich.console import Console
from rich.progress import track
from rich.table import Table
from served import serve
from test_fuzz_cost import MAX_RATIO, TYPES

from plain_http import NO_TLS

MAX_DELAY: Final = 0.1
"""Seconds; of the stream's p99 inter-token latency, and of an answer of /health."""

SHORTEST: Final = 0.1
"""Seconds; the ratio of two calls is looked at if the longer one takes at least this."""

MIN_GAPS: Final = 100
BODY_LIMIT_BYTES: Final = 8 << 20
OPTIONS: Final[dict[str, Any]] = {
    "num_kv_blocks": 2048,
    "max_num_batched_tokens": 64,
    "trust_request_chat_template": True,
    "max_queued_tokens": 16_000_000,
}
"""Small steps: the time of the engine's own steps is no part of the delay that is measured."""


@dataclass(slots=True)
class Victim:
    """A stream and a caller of /health beside the measured calls, in a process of their own: bodies are made in this
    one, which would delay the threads that read the stream.

    Attributes:
        gaps, health: seconds between tokens, and seconds of each call, since the last `reset`.
    """

    url: str
    gaps: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)

    def run(self, requests: Connection) -> None:
        """Answer requests of the measuring process until it sends None: "reset", or "report" with both lists."""
        for target in (self._stream, self._watch_health):
            threading.Thread(target=target, daemon=True).start()
        while (request := requests.recv()) is not None:
            if request == "reset":
                self.gaps, self.health = [], []
            else:
                requests.send((list(self.gaps), list(self.health)))

    def _stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        while True:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60, verify=NO_TLS) as response:
                last = None
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now

    def _watch_health(self) -> None:
        with httpx.Client(verify=NO_TLS, timeout=30) as client:
            while True:
                started = time.perf_counter()
                client.get(f"{self.url}/health")
                self.health.append(time.perf_counter() - started)
                time.sleep(0.01)


def victim_beside(url: str) -> Connection:
    """Start a victim; returns the connection that its process answers on."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=Victim(url).run, args=(theirs,), daemon=True).start()
    return ours


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case at its three sizes.

    Attributes:
        seconds: of the calls; statuses: of their answers.
        gap: p99 of the stream's inter-token latency, in seconds, while the largest call ran, or of the last second.
        health: the slowest answer of /health meanwhile.
    """

    case: Case
    sizes: list[int]
    seconds: list[float]
    statuses: list[int]
    gap: float
    health: float

    @property
    def ratio(self) -> float:
        """The growth at a doubling of the size: the geometric mean of the two doublings, because the smallest body may
        fit into a cache that the others do not fit into."""
        return float((self.seconds[-1] / self.seconds[0]) ** 0.5) if self.seconds[-1] >= SHORTEST else 0.0

    @property
    def fails(self) -> bool:
        return self.ratio > MAX_RATIO or self.gap > MAX_DELAY or self.health > MAX_DELAY or max(self.statuses) >= 500


def measure(case: Case, url: str, victim: Connection, largest: int, repeats: int) -> Measurement:
    sizes, seconds, statuses = [], [], []
    headers = {"Content-Type": "application/json"}
    with httpx.Client(verify=NO_TLS, timeout=120, headers=headers) as client:
        for doubling in range(3):
            body = case.body(largest >> (2 - doubling))
            victim.send("reset")
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                answer = client.post(f"{url}{PATHS[case.endpoint]}", content=body)
                times.append(time.perf_counter() - started)
            sizes.append(len(body))
            seconds.append(statistics.median(times))
            statuses.append(answer.status_code)
    gaps, health = _report(victim)
    return Measurement(case, sizes, seconds, statuses, sorted(gaps)[max(0, int(len(gaps) * 0.99) - 1)], max(health))


def _report(victim: Connection) -> tuple[list[float], list[float]]:
    """What the victim has measured since the largest call began, once that is enough for a percentile."""
    while True:
        victim.send("report")
        gaps, health = victim.recv()
        if len(gaps) >= MIN_GAPS and len(health) >= 5:
            return gaps, health
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--endpoint", choices=sorted(PATHS), help="only this one")
    parser.add_argument("--field", default="", help="only fields whose path contains this")
    parser.add_argument("--bytes", type=int, default=BODY_LIMIT_BYTES - 1024, help="of the largest body")
    parser.add_argument("--repeats", type=int, default=1, help="calls of each size, of which the median counts")
    options = parser.parse_args()
    cases = [c for c in all_cases(TYPES) if options.field in c.field and options.endpoint in (None, c.endpoint)]
    found: list[Measurement] = []
    started = time.monotonic()
    from chairlift.loading.fetch import fetch_default_model

    with serve({"model": fetch_default_model(), **OPTIONS}) as served:
        victim = victim_beside(served.url)
        _report(victim)
        for case in track(cases, "cases", console=Console(stderr=True)):
            found.append(_confirmed(case, served.url, victim, options.bytes, options.repeats))
            if found[-1].fails:
                print(found[-1], file=sys.stderr)
        victim.send(None)
    _print(found, time.monotonic() - started)
    sys.exit(any(measurement.fails for measurement in found))


def _confirmed(case: Case, url: str, victim: Connection, largest: int, repeats: int) -> Measurement:
    """A failure counts if it is seen twice: other programs on the machine cause single ones."""
    first = measure(case, url, victim, largest, repeats)
    return measure(case, url, victim, largest, 3) if first.fails else first


def _print(found: list[Measurement], seconds: float) -> None:
    table = Table("endpoint", "worst field", "seconds at n, 2n, 4n", "ratio", "ITL p99, ms", "/health, ms", "status")
    for endpoint in PATHS:
        of_endpoint = [m for m in found if m.case.endpoint == endpoint]
        rows = [m for m in of_endpoint if m.fails] or sorted(of_endpoint, key=lambda m: -m.seconds[-1])[:1]
        for m in rows:
            times = " ".join(f"{value:.2f}" for value in m.seconds)
            delays = f"{1e3 * m.gap:.0f}", f"{1e3 * m.health:.0f}"
            name = f"{m.case.field}{' FAILS' if m.fails else ''}"
            table.add_row(endpoint, name, times, f"{m.ratio:.2f}", *delays, str(m.statuses[-1]))
    Console(width=150).print(table)
    figures = {
        "cases": len(found),
        "failed": [f"{m.case.endpoint}: {m.case.field}" for m in found if m.fails],
        "slowest_seconds": round(max(m.seconds[-1] for m in found), 3),
        "largest_ratio": round(max(m.ratio for m in found), 2),
        "largest_itl_p99_ms": round(1e3 * max(m.gap for m in found), 1),
        "largest_health_ms": round(1e3 * max(m.health for m in found), 1),
    }
    print(json.dumps({"fuzz_cost": figures, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
