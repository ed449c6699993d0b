"""Measures what large requests cost, alone and multiplied by many answers: the delays of another stream beside them.

    python -m tools.fuzz_cost [--minutes 25] [--endpoint chat messages] [--field tools]
                                         [--multiplier n beams] [--bytes 8000000] [--server-python PYTHON]

A server with the default model and its tokenizer answers the cases of `cost_cases.py`. For every endpoint, every field
that holds a list, a string or an object is grown up to the limit of a body ("plain"). If this call takes long, it is
also made with half and a quarter of the bytes. Where a body can ask for many answers, the same fields are sent again
with n=128, with 16 prompts of 128 answers each, and with 32 beams, in the largest of some sizes that is answered alone.

Prints a line for each case as soon as it is measured: the largest gap of a stream of another caller, the slowest
answer of /health, CPU seconds and growth of memory of both processes. Then a table of the cases that exceed a limit,
and as its last line JSON. A run that is interrupted, or reaches `--minutes`, prints the summary of what it has
measured, and what it has left out. The order is random with a seed: first completions, then multiplied cases, then all
other ones.

Ends with status 1 if a case exceeds a limit: a gap or an answer of /health of more than 100 ms, a time that more than
grows with the size (ratio of a doubling above 2.6), a status of 500 or above, no answer, or a restarted engine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from benchmarks.server_process import ServerProcess, Usage, checkout_of
from benchmarks.victim import VictimProcess, VictimReport, victim_beside
from rich.console import Console
from rich.table import Table

from support.plain_http import NO_TLS
from support.served import as_options
from tools.cost_cases import BASES, MAX_RATIO, MULTIPLIERS, PATHS, Case, all_cases, multiplied_cases

MAX_DELAY: Final = 0.1
"""Seconds; of a gap of the stream, and of an answer of /health."""

GROWTH_SECONDS: Final = 0.5
"""A call that takes this long is also made with smaller bodies, because the time of a short one says little."""

CALL_SECONDS: Final = 60.0
"""Seconds after which the client of a measured call disconnects."""

NO_ANSWER: Final = 0
"""The status of a call without an answer."""

BODY_LIMIT_BYTES: Final = 8 << 20
SMALLEST_BYTES: Final = 512
STEP_OF_SIZES: Final = 4
"""The sizes that are tried for a multiplied case, each a quarter of the one before."""

PLAIN: Final = "plain"

OPTIONS: Final[dict[str, Any]] = {
    "num_kv_blocks": 2048,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 33,
    "max_queued_tokens": 16_000_000,
    "max_queued_requests": 4096,
}
"""Small steps: the time of the engine's own steps is no part of the delay that is measured. There are seats for 32
beams and the stream."""

HEADER: Final = (
    f"{'case':>9} {'bytes':>8} {'s':>6} {'ratio':>5} {'gap':>7} {'/health':>7} "
    f"{'CPU s':>11} {'MiB':>11} {'status':>6}  field"
)
"""Of the lines of the cases; the delays are in milliseconds, CPU time and memory those of HTTP process and engine."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A case at its largest size.

    Attributes:
        size: of the body in bytes.
        seconds: of the calls, from the smallest body to the largest one.
        status: of the last answer.
        report: the delays of the victim since the first of these calls.
    """

    case: Case
    size: int
    seconds: list[float]
    status: int
    report: VictimReport
    usage: Usage

    @property
    def ratio(self) -> float:
        """The growth at a doubling of the size: the geometric mean of the two doublings, because the smallest body may
        fit into a cache that the others do not fit into; 0 if it was not measured."""
        return float((self.seconds[-1] / self.seconds[0]) ** 0.5) if len(self.seconds) > 1 else 0.0

    @property
    def delay(self) -> float:
        """The largest delay of another caller in seconds."""
        return max(self.report.largest_gap, self.report.largest_health)

    @property
    def fails(self) -> bool:
        is_broken = self.status == NO_ANSWER or self.status >= 500 or self.usage.engine_restarts > 0
        return self.ratio > MAX_RATIO or self.delay > MAX_DELAY or is_broken

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        return {
            "case": self.case.name,
            "bytes": self.size,
            "seconds": round(self.seconds[-1], 3),
            "ratio": round(self.ratio, 2),
            "gap_ms": round(1e3 * self.report.largest_gap, 1),
            "health_ms": round(1e3 * self.report.largest_health, 1),
            **self.usage.figures(),
            "status": self.status,
        }


@dataclass(slots=True)
class CostRun:
    """The measured cases, and those that are not measured.

    Attributes:
        never_answered: multiplied cases whose field is not answered in any size.
        unreached: cases that the time was not sufficient for.
    """

    found: list[Measurement] = field(default_factory=list)
    never_answered: list[Case] = field(default_factory=list)
    unreached: list[Case] = field(default_factory=list)

    @property
    def failed(self) -> list[Measurement]:
        """The cases that exceed a limit, from the largest delay to the smallest one."""
        return sorted((each for each in self.found if each.fails), key=lambda each: -each.delay)

    def figures(self) -> dict[str, Any]:
        """The figures for JSON."""
        over = [each for each in self.found if each.delay > MAX_DELAY]
        return {
            "cases": len(self.found),
            "over_0.1_s": len(over),
            "over_by_kind": dict(Counter(each.case.multiplier or PLAIN for each in over)),
            "largest_gap_ms": round(1e3 * max((each.report.largest_gap for each in self.found), default=0.0), 1),
            "largest_health_ms": round(1e3 * max((each.report.largest_health for each in self.found), default=0.0), 1),
            "largest_ratio": round(max((each.ratio for each in self.found), default=0.0), 2),
            "slowest_seconds": round(max((each.seconds[-1] for each in self.found), default=0.0), 3),
            "failed": [each.figures() for each in self.failed],
            "never_answered": len(self.never_answered),
            "unreached": dict(Counter(case.multiplier or PLAIN for case in self.unreached)),
        }


class MeasuredServer:
    """A server and a victim beside it, which are replaced after a case that the server does not recover from."""

    def __init__(self, model: str, python: str | None) -> None:
        self._options = [model, *as_options(OPTIONS)]
        self._python = python
        self._stack = contextlib.ExitStack()
        self._sizes: dict[tuple[str, str], int | None] = {}
        self.start()

    def start(self) -> None:
        """Start a server, and wait until its stream runs."""
        self._server = ServerProcess(*self._options, python=self._python)
        self._stack.callback(self._server.close)
        self._victim: VictimProcess = self._stack.enter_context(victim_beside(self._server.url))
        self._client = self._stack.enter_context(httpx.Client(base_url=self._server.url, timeout=60, verify=NO_TLS))
        for endpoint, base in BASES.items():
            self._client.post(PATHS[endpoint], json=base)  # What is imported and cached at first use is not measured.
        self._victim.report_after(num_gaps=20)

    def close(self) -> None:
        self._stack.close()

    def call(self, endpoint: str, body: bytes) -> tuple[float, int]:
        """Make a call; returns its seconds and its status."""
        started, status = time.perf_counter(), NO_ANSWER
        with contextlib.suppress(httpx.HTTPError):
            headers = {"Content-Type": "application/json"}
            answer = self._client.post(PATHS[endpoint], content=body, headers=headers, timeout=CALL_SECONDS)
            status = answer.status_code
        return time.perf_counter() - started, status

    def answered_size(self, case: Case, largest: int) -> int | None:
        """The largest of some sizes in which a field is answered with status 200 without a multiplier, if any."""
        key = (case.endpoint, case.field)
        if key not in self._sizes:
            plain = next(each for each in all_cases() if (each.endpoint, each.field) == key)
            sizes = [largest]
            while sizes[-1] >= STEP_OF_SIZES * SMALLEST_BYTES:
                sizes.append(sizes[-1] // STEP_OF_SIZES)
            answered = (size for size in sizes if self.call(case.endpoint, plain.body(size))[1] == 200)
            self._sizes[key] = next(answered, None)
        return self._sizes[key]

    def measure(self, case: Case, size: int) -> Measurement:
        """Measure a case once. The server is replaced if its stream does not go on afterwards."""
        bodies = [case.body(size >> shift) for shift in (0, 1, 2)]
        self._victim.report_after(num_gaps=2)
        self._victim.reset()
        with self._server.measured() as usage:
            calls = [self.call(case.endpoint, bodies[0])]
            if calls[0][0] >= GROWTH_SECONDS and not case.multiplier and calls[0][1] != NO_ANSWER:
                calls += [self.call(case.endpoint, body) for body in bodies[1:]]
            report = self._victim.report_after(num_gaps=1)
        seconds = [seconds for seconds, _status in reversed(calls)]
        measurement = Measurement(case, len(bodies[0]), seconds, calls[0][1], report, usage)
        if measurement.status == NO_ANSWER or usage.engine_restarts or report.failures:
            self.close()
            self.start()
        return measurement

    def confirmed(self, case: Case, size: int) -> Measurement:
        """Measure a case, and again if it fails: other programs on the machine cause single delays."""
        first = self.measure(case, size)
        if not first.fails or first.status == NO_ANSWER:
            return first
        return min(first, self.measure(case, size), key=lambda each: (each.fails, each.delay))


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The chosen cases in the order in which they are measured."""
    groups: list[list[Case]] = [[], [], []]
    for case in all_cases():
        groups[0 if case.endpoint == "completions" else 2].append(case)
    for name, multiplier in MULTIPLIERS.items():
        groups[1] += multiplied_cases(name, multiplier.max_answers)
    rng = random.Random(options.seed)
    for group in groups:
        rng.shuffle(group)
    return [
        case
        for group in groups
        for case in group
        if options.field in case.field
        and case.endpoint in options.endpoint
        and (case.multiplier or PLAIN) in options.multiplier
    ]


def measure_all(cases: Sequence[Case], options: argparse.Namespace, run: CostRun) -> None:
    """Measure the cases on one server until the time is over; `run` receives them one by one."""
    from chairlift.loading.fetch import fetch_model

    end = time.monotonic() + 60 * options.minutes
    server = MeasuredServer(str(options.model or fetch_model()), options.server_python)
    run.unreached = list(cases)
    try:
        print(HEADER, flush=True)
        for number, case in enumerate(cases, 1):
            if time.monotonic() > end:
                return
            size = server.answered_size(case, options.bytes) if case.multiplier else options.bytes
            run.unreached.remove(case)
            if size is None:
                run.never_answered.append(case)
                continue
            run.found.append(server.confirmed(case, size))
            print(_line(f"{number}/{len(cases)}", run.found[-1]), flush=True)
    finally:
        server.close()


def _line(number: str, measurement: Measurement) -> str:
    row = measurement.figures()
    ratio = f"{measurement.ratio:.2f}" if measurement.ratio else "-"
    cpu = f"{row['http_cpu_s']:.1f} {row['engine_cpu_s']:.1f}"
    memory = f"{row['http_memory_mib']:.0f} {row['engine_memory_mib']:.0f}"
    delays = f"{row['gap_ms']:7.0f} {row['health_ms']:7.0f}"
    status = f"{measurement.status or 'none':>6}{'  FAILS' if measurement.fails else ''}"
    sizes = f"{measurement.size:8} {row['seconds']:6.2f} {ratio:>5}"
    return f"{number:>9} {sizes} {delays} {cpu:>11} {memory:>11} {status}  {measurement.case.name}"


def print_summary(run: CostRun, options: argparse.Namespace, seconds: float) -> None:
    """The cases that exceed a limit, as a table, and all figures as JSON."""
    title = f"{len(run.failed)} of {len(run.found)} cases exceed a limit"
    table = Table("case", "bytes", "status", title=title)
    columns = ("s", "ratio", "gap, ms", "/health, ms", "CPU s: HTTP", "engine", "MiB: HTTP", "engine")
    for name in columns:
        table.add_column(name, justify="right")
    keys = ("seconds", "ratio", "gap_ms", "health_ms", "http_cpu_s", "engine_cpu_s", "http_memory_mib")
    for row in (each.figures() for each in run.failed):
        cells = [str(row[key]) for key in (*keys, "engine_memory_mib")]
        table.add_row(row["case"], str(row["bytes"]), str(row["status"] or "none"), *cells)
    console = Console(width=150)
    console.print(table)
    if run.never_answered:
        names = ", ".join(case.name for case in run.never_answered)
        console.print(f"left out, because the field alone is not answered with 200: {names}", style="dim")
    if run.unreached:
        console.print(f"not reached in {options.minutes:g} minutes: {len(run.unreached)} cases", style="dim")
    served = checkout_of(options.server_python)
    facts = {"served": f"{served.version} {served.commit}", "seed": options.seed, "seconds": round(seconds, 1)}
    print(json.dumps({"fuzz_cost": run.figures(), **facts}), flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    kinds = [PLAIN, *MULTIPLIERS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=25.0, help="no case begins later")
    parser.add_argument("--endpoint", choices=sorted(PATHS), nargs="+", default=list(PATHS), help="only these")
    parser.add_argument("--field", default="", help="only fields whose path contains this")
    parser.add_argument("--multiplier", choices=kinds, nargs="+", default=kinds, help="only these")
    parser.add_argument("--bytes", type=int, default=BODY_LIMIT_BYTES - 1024, help="of the largest body")
    parser.add_argument("--model", help="in place of the default model")
    parser.add_argument("--server-python", help="the interpreter of another checkout, whose code serves")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the cases")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    cases = chosen_cases(options)
    if not cases:
        raise SystemExit(f"no field of these endpoints contains {options.field!r}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run, started = CostRun(), time.monotonic()
    try:
        measure_all(cases, options, run)
    finally:
        if run.found:
            print_summary(run, options, time.monotonic() - started)
    sys.exit(bool(run.failed))


if __name__ == "__main__":
    main()
