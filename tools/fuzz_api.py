"""The long run of schemathesis, in rounds with new seeds until the number of cases is reached.

    python -m tools.fuzz_api [--cases 2000] [--seed N] [--url URL]

With a URL, it calls a running server whose model is named "tiny". It prints a table and, as the last line, JSON. It
ends with status 1 at the first call that fails a check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chairlift import AsyncLLM
from support.running_server import run_server
from support.tiny_engine import tiny_options
from tools.generated_calls import SERVER_OPTIONS, Outcome, fuzz_api, fuzz_bodies

CASES_A_ROUND = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first round (default: 1)")
    parser.add_argument("--url", help="the address of a server that runs; by default one is started")
    options = parser.parse_args()
    outcome = Outcome()
    started, seed = time.monotonic(), options.seed
    with contextlib.nullcontext(options.url) if options.url else _start_server() as url:
        while outcome.num_cases < options.cases:
            print(f"seed {seed}: {outcome.num_cases} cases so far", file=sys.stderr)
            fuzz_api(url, min(CASES_A_ROUND, options.cases - outcome.num_cases), seed, outcome)
            seed += 1
        bodies = fuzz_bodies(url, options.cases // 2, options.seed)
    _print(outcome, bodies, options.seed, time.monotonic() - started)


@contextlib.contextmanager
def _start_server() -> Iterator[str]:
    """A server with a tiny model, of whose calls nothing may be left at the end; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        llm = AsyncLLM(**tiny_options(Path(folder), **SERVER_OPTIONS))
        with run_server(llm, "tiny") as server:
            yield server.url
            server.wait_until_idle()


def _print(outcome: Outcome, bodies: Counter[int], first_seed: int, seconds: float) -> None:
    statuses = sorted({status for _, status in outcome.statuses})
    table = Table("operation", *map(str, statuses), title=f"schemathesis: {outcome.num_cases} cases, no failure")
    for operation in sorted({operation for operation, _ in outcome.statuses}):
        table.add_row(operation, *(str(outcome.statuses[operation, status] or "") for status in statuses))
    Console(width=120).print(table)
    counts = {str(status): sum(n for (_, s), n in outcome.statuses.items() if s == status) for status in statuses}
    print(f"{bodies.total()} bodies that are no JSON, or hardly: {dict(sorted(bodies.items()))}")
    figures = {
        "bodies": {str(status): count for status, count in bodies.items()},
        "cases": outcome.num_cases,
        "statuses": counts,
        "slowest_seconds": round(outcome.slowest, 3),
    }
    print(json.dumps({"fuzz_api": figures, "first_seed": first_seed, "seconds": round(seconds, 1)}))


if __name__ == "__main__":
    main()
