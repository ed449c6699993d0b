"""The soak: thousands of requests of every kind against `chairlift serve`, and nothing left of them.

    python tests/robustness/soak.py [--requests 5000] [--seed N]

Prints a table and, as its last line, JSON; ends with status 1 at the first thing that is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table
from served import Served, serve
from soak_load import SERVER_OPTIONS, Tally, check_pool, make_asks, run_load, wait_until_idle

from native import unavailable_reason
from tiny_engine import tiny_options

ROUNDS = 10
WARM_ROUNDS = 2
"""Before these are over, caches fill: memory and descriptors are compared with what they are then."""

MAX_GROWTH_BYTES = (16 if unavailable_reason() is None else 128) << 20
"""torch's kernels keep something for every shape of a step that they meet; 500 requests have met most shapes."""

MAX_HELPERS = 3
"""Processes that compile grammars (two) and render templates; each is started when it is first needed."""

DESCRIPTORS_A_HELPER = 5
"""Three of its own and its server's ends of two pipes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What the server held after a round; helpers' descriptors are not in it."""

    num_requests: int
    descriptors: int
    helpers: int
    resident: list[int]
    preemptions: float


async def soak(served: Served, num_requests: int, seed: int, rounds: int = ROUNDS) -> tuple[Tally, list[Mark]]:
    """Rounds of load, a look at the server after each."""
    tally, marks = Tally(), []
    asks = make_asks(num_requests, seed)
    size = -(-num_requests // rounds)
    for start in range(0, num_requests, size):
        await run_load(served.url, asks[start : start + size], tally)
        await wait_until_idle(served)
        check_pool(served)
        preemptions = served.metric("vllm:num_preemptions_total")
        await asyncio.sleep(0.3)  # connections that were left close
        marks.append(_mark(served, tally.num_requests, preemptions))
        print(f"{tally.num_requests} of {num_requests} requests", file=sys.stderr)
    assert tally.num_requests == num_requests, "each request is answered, refused or given up, once"
    check_growth(marks)
    return tally, marks


def _mark(served: Served, num_requests: int, preemptions: float) -> Mark:
    resident = served.resident_bytes()
    helpers = len(resident) - 2
    descriptors = served.num_descriptors() - DESCRIPTORS_A_HELPER * helpers
    return Mark(num_requests, descriptors, helpers, resident[:2], preemptions)


def check_growth(marks: list[Mark]) -> None:
    """Nothing grows once it is warm."""
    warm, last = marks[min(WARM_ROUNDS, len(marks)) - 1], marks[-1]
    assert last.helpers <= MAX_HELPERS
    assert last.descriptors <= warm.descriptors, f"descriptors: {[mark.descriptors for mark in marks]}"
    for before, after in zip(warm.resident, last.resident, strict=True):
        assert after - before < MAX_GROWTH_BYTES, f"resident bytes: {[mark.resident for mark in marks]}"
    assert last.preemptions > 0, "the pool was too large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serve(tiny_options(Path(folder), **SERVER_OPTIONS)) as served:
        tally, marks = asyncio.run(soak(served, options.requests, options.seed))
    _print(tally, marks, options.seed, time.monotonic() - started)


def _print(tally: Tally, marks: list[Mark], seed: int, seconds: float) -> None:
    console = Console(width=120)
    table = Table("after", "descriptors", "HTTP process, MiB", "engine process, MiB", "preemptions", title="Soak")
    for mark in marks:
        sizes = [f"{size / 2**20:.1f}" for size in mark.resident]
        table.add_row(str(mark.num_requests), str(mark.descriptors), *sizes, f"{mark.preemptions:.0f}")
    console.print(table)
    console.print(f"{_counts(tally.outcomes)}; of them {_counts(tally.kinds)}; {tally.output_tokens} tokens answered")
    warm, last = marks[min(WARM_ROUNDS, len(marks)) - 1], marks[-1]
    figures: dict[str, Any] = {
        "requests": tally.num_requests,
        **tally.outcomes,
        "kinds": dict(tally.kinds),
        "output_tokens": tally.output_tokens,
        "preemptions": last.preemptions,
        "descriptors": [warm.descriptors, last.descriptors],
        "resident_bytes": [warm.resident, last.resident],
        "seed": seed,
        "seconds": round(seconds, 1),
    }
    print(json.dumps({"soak": figures}))


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))


if __name__ == "__main__":
    main()
