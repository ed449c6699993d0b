"""Soak test: thousands of requests of every kind to `chairlift serve`, with a check that no resources leak.

    python tests/robustness/soak.py [--requests 5000] [--seed N]

It prints a table and, as the last line, JSON. It ends with status 1 at the first failure.
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
from soak_load import SERVER_OPTIONS, Tally, check_pool, make_requests, run_load, wait_until_idle

from native import unavailable_reason
from tiny_engine import tiny_options

ROUNDS = 10
WARM_ROUNDS = 2
"""The rounds in which caches fill. Memory and descriptors are compared with those at their end."""

MAX_GROWTH_BYTES = (16 if unavailable_reason() is None else 128) << 20
"""torch's kernels cache data for each shape of a step. Most shapes occur within 500 requests."""

MAX_HELPERS = 3
"""Two processes that compile grammars and one that renders templates. Each starts on first use."""

DESCRIPTORS_PER_HELPER = 5
"""Three descriptors of the helper, and the server's ends of two pipes."""


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """The resources of the server after a round. The descriptors of its helpers are not included."""

    num_requests: int
    descriptors: int
    helpers: int
    resident: list[int]
    preemptions: float


async def soak(served: Served, num_requests: int, seed: int, rounds: int = ROUNDS) -> tuple[Tally, list[ResourceUsage]]:
    """Run rounds of load, and measure the server's resources after each."""
    tally, usages = Tally(), []
    requests = make_requests(num_requests, seed)
    size = -(-num_requests // rounds)
    for start in range(0, num_requests, size):
        await run_load(served.url, requests[start : start + size], tally)
        await wait_until_idle(served)
        check_pool(served)
        preemptions = served.metric("vllm:num_preemptions_total")
        await asyncio.sleep(0.3)  # Abandoned connections close.
        usages.append(_measure(served, tally.num_requests, preemptions))
        print(f"{tally.num_requests} of {num_requests} requests", file=sys.stderr)
    assert tally.num_requests == num_requests, "each request is answered, rejected or aborted, once"
    check_growth(usages)
    return tally, usages


def _measure(served: Served, num_requests: int, preemptions: float) -> ResourceUsage:
    resident = served.resident_bytes()
    helpers = len(resident) - 2
    descriptors = served.num_descriptors() - DESCRIPTORS_PER_HELPER * helpers
    return ResourceUsage(num_requests, descriptors, helpers, resident[:2], preemptions)


def check_growth(usages: list[ResourceUsage]) -> None:
    """Check that memory and descriptors do not grow after WARM_ROUNDS."""
    warm, last = usages[min(WARM_ROUNDS, len(usages)) - 1], usages[-1]
    assert last.helpers <= MAX_HELPERS
    assert last.descriptors <= warm.descriptors, f"descriptors: {[usage.descriptors for usage in usages]}"
    for before, after in zip(warm.resident, last.resident, strict=True):
        assert after - before < MAX_GROWTH_BYTES, f"resident bytes: {[usage.resident for usage in usages]}"
    assert last.preemptions > 0, "the pool was too large"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serve(tiny_options(Path(folder), **SERVER_OPTIONS)) as served:
        tally, usages = asyncio.run(soak(served, options.requests, options.seed))
    _print(tally, usages, options.seed, time.monotonic() - started)


def _print(tally: Tally, usages: list[ResourceUsage], seed: int, seconds: float) -> None:
    console = Console(width=120)
    table = Table("after", "descriptors", "HTTP process, MiB", "engine process, MiB", "preemptions", title="Soak")
    for usage in usages:
        sizes = [f"{size / 2**20:.1f}" for size in usage.resident]
        table.add_row(str(usage.num_requests), str(usage.descriptors), *sizes, f"{usage.preemptions:.0f}")
    console.print(table)
    console.print(f"{_counts(tally.outcomes)}; of them {_counts(tally.kinds)}; {tally.output_tokens} tokens answered")
    warm, last = usages[min(WARM_ROUNDS, len(usages)) - 1], usages[-1]
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
