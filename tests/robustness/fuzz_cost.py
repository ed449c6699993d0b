"""Measures what large requests cost: their time at n, 2n and 4n bytes, and the delay of a stream beside them.

    python tests/robustness/fuzz_cost.py [--endpoint chat messages] [--field tools] [--bytes 8000000] [--repeats 1]

For every endpoint, every field that holds a list, a string or an object is grown up to the limit of a body. Prints a
line for each field as soon as it is measured, then the worst figures of each endpoint, and as its last line JSON. A run
that is interrupted prints the summary of what it has measured. Ends with status 1 if the time of a call more than grows
with its size (ratio of a doubling above 2.6), or if the p99 of the inter-token latency of the stream beside it, or the
slowest answer of /health, exceeds 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from cost_cases import PATHS, Case, all_cases
from rich.console import Console
from rich.table import Table
from served import serve
from test_fuzz_cost import MAX_RATIO

from plain_http import NO_TLS

MAX_DELAY: Final = 0.1
"""Seconds; of the stream's p99 inter-token latency, and of an answer of /health."""

SHORTEST: Final = 0.1
"""Seconds; the ratio of two calls is looked at if the longer one takes at least this."""

MIN_GAPS: Final = 100
"""Gaps between tokens that a p99 is taken of; those before and after the largest call fill up what it lacks."""

REPORT_SECONDS: Final = 60
"""Seconds until a stream or /health that makes no progress ends the run."""

BODY_LIMIT_BYTES: Final = 8 << 20
STREAM_TOKENS: Final = 2000
"""Tokens of one stream; the next one follows at once. The gaps of a longer context are longer by themselves."""

OPTIONS: Final[dict[str, Any]] = {
    "num_kv_blocks": 2048,
    "max_num_batched_tokens": 64,
    "max_queued_tokens": 16_000_000,
}
"""Small steps: the time of the engine's own steps is no part of the delay that is measured."""

HEADER: Final = (
    f"{'case':>7}  {'seconds at n, 2n, 4n':>20} {'ratio':>6} {'ITL p99':>8} {'/health':>8} {'status':>6}  field"
)
"""Of the lines of the cases; the delays are in milliseconds."""


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
        """Answer requests of the measuring process: "reset", or "report" with both lists."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the measuring process ends this one
        for target in (self._stream, self._watch_health):
            threading.Thread(target=target, daemon=True).start()
        while True:
            if requests.recv() == "reset":
                self.gaps, self.health = [], []
            else:
                requests.send((list(self.gaps), list(self.health)))

    def _stream(self) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
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


@contextlib.contextmanager
def victim_beside(url: str) -> Iterator[Connection]:
    """Run a victim in a process; yields the connection on which it answers."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=Victim(url).run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case at its three sizes.

    Attributes:
        seconds: of the calls; statuses: of their answers.
        gap: p99 of the stream's inter-token latency in seconds, of the gaps since the calls of the largest body began,
            or of the last `MIN_GAPS` if these are more.
        health: the slowest answer of /health since then, in seconds.
    """

    case: Case
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
    bodies = [case.body(largest >> shift) for shift in (2, 1, 0)]
    seconds, statuses = [], []
    gaps_before = health_before = 0
    victim.send("reset")
    with httpx.Client(verify=NO_TLS, timeout=120, headers={"Content-Type": "application/json"}) as client:
        for body in bodies:
            gaps_before, health_before = map(len, _report(victim))
            times = []
            for _ in range(repeats):
                started = time.perf_counter()
                answer = client.post(f"{url}{PATHS[case.endpoint]}", content=body)
                times.append(time.perf_counter() - started)
            seconds.append(statistics.median(times))
            statuses.append(answer.status_code)
    gaps, health = _report_after_calls(victim)
    return Measurement(case, seconds, statuses, p99(gaps, gaps_before), max(health[health_before:]))


def p99(gaps: list[float], start: int) -> float:
    """The p99 (nearest rank) of the gaps from `start` on, or of the last `MIN_GAPS` if these are more."""
    counted = sorted(gaps[max(0, min(start, len(gaps) - MIN_GAPS)) :])
    return counted[math.ceil(0.99 * len(counted)) - 1]


def _report(victim: Connection) -> tuple[list[float], list[float]]:
    """What the victim has measured since it was reset: gaps, and times of /health."""
    victim.send("report")
    gaps, health = victim.recv()
    return gaps, health


def _report_after_calls(victim: Connection) -> tuple[list[float], list[float]]:
    """The report once it has the gap and the call of /health that the last measured call may have delayed, and enough
    gaps for a percentile."""
    gaps, health = _report(victim)
    min_gaps, min_health = max(MIN_GAPS, len(gaps) + 1), len(health) + 1
    deadline = time.monotonic() + REPORT_SECONDS
    while len(gaps) < min_gaps or len(health) < min_health:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the stream or /health made no progress for {REPORT_SECONDS} seconds")
        time.sleep(0.01)
        gaps, health = _report(victim)
    return gaps, health


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--endpoint", choices=sorted(PATHS), nargs="+", default=list(PATHS), help="only these")
    parser.add_argument("--field", default="", help="only fields whose path contains this")
    parser.add_argument("--bytes", type=int, default=BODY_LIMIT_BYTES - 1024, help="of the largest body")
    parser.add_argument("--repeats", type=int, default=1, help="calls of each size, of which the median counts")
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.field in case.field and case.endpoint in options.endpoint]
    if not cases:
        parser.error(f"no field of these endpoints contains {options.field!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found: list[Measurement] = []
    started = time.monotonic()
    try:
        _measure_all(cases, options.bytes, options.repeats, found)
    finally:
        if found:
            _print_summary(found, len(cases), time.monotonic() - started)
    sys.exit(any(measurement.fails for measurement in found))


def _measure_all(cases: list[Case], largest: int, repeats: int, found: list[Measurement]) -> None:
    """Measure the cases on one server; `found` receives them one by one, and their lines are printed."""
    from chairlift.loading.fetch import fetch_model

    with serve({"model": fetch_model(), **OPTIONS}) as served, victim_beside(served.url) as victim:
        _report_after_calls(victim)
        for case in {case.endpoint: case for case in cases}.values():
            measure(case, served.url, victim, largest, 1)  # what is imported and cached at first use is not measured
        print(HEADER, flush=True)
        for number, case in enumerate(cases, 1):
            found.append(_confirmed(case, served.url, victim, largest, repeats))
            print(_line(f"{number}/{len(cases)}", found[-1]), flush=True)


def _confirmed(case: Case, url: str, victim: Connection, largest: int, repeats: int) -> Measurement:
    """A failure counts if it is seen twice: other programs on the machine cause single ones."""
    first = measure(case, url, victim, largest, repeats)
    return measure(case, url, victim, largest, 3) if first.fails else first


def _line(number: str, measurement: Measurement) -> str:
    times = " ".join(f"{value:6.2f}" for value in measurement.seconds)
    ratio = f"{measurement.ratio:.2f}" if measurement.ratio else "-"
    delays = f"{1e3 * measurement.gap:8.0f} {1e3 * measurement.health:8.0f}"
    name = f"{measurement.case.endpoint}: {measurement.case.field}"
    status = f"{measurement.statuses[-1]:6}{'  FAILS' if measurement.fails else ''}"
    return f"{number:>7}  {times} {ratio:>6} {delays} {status}  {name}"


def _print_summary(found: list[Measurement], num_cases: int, seconds: float) -> None:
    """The worst figures of each endpoint, as a table, and of all, as JSON."""
    table = Table("endpoint", "cases", "longest call, s", "largest ratio", "ITL p99, ms", "/health, ms", "failed")
    for endpoint in dict.fromkeys(m.case.endpoint for m in found):
        of_endpoint = [m for m in found if m.case.endpoint == endpoint]
        figures = _figures(of_endpoint)
        table.add_row(endpoint, *(str(len(value) if isinstance(value, list) else value) for value in figures.values()))
    Console(width=120).print(table)
    not_measured = {"cases_not_measured": num_cases - len(found)}
    print(json.dumps({"fuzz_cost": {**_figures(found), **not_measured}, "seconds": round(seconds, 1)}), flush=True)


def _figures(found: list[Measurement]) -> dict[str, Any]:
    return {
        "cases": len(found),
        "slowest_seconds": round(max(max(m.seconds) for m in found), 3),
        "largest_ratio": round(max(m.ratio for m in found), 2),
        "largest_itl_p99_ms": round(1e3 * max(m.gap for m in found), 1),
        "largest_health_ms": round(1e3 * max(m.health for m in found), 1),
        "failed": [f"{m.case.endpoint}: {m.case.field}" for m in found if m.fails],
    }


if __name__ == "__main__":
    main()
