"""Measures the TTFT of one API key while another key sends 20 times as many requests to the same server.

    python -m benchmarks.fairness [--rate 5] [--seconds 7] [--png docs/images/fairness.png] [--json] [-- SERVE OPTIONS]

Each scheduling policy has its own server (`chairlift serve` with two API keys) and two runs with the same arrivals of
the key `light`. In the first run the key `heavy` sends as many requests as `light`. In the second one, the flood, it
sends 20 times as many, which is more than the server can answer. The script checks two claims about the median time to
the first token (TTFT) of `light`:

a. under --scheduling-policy fair, the flood increases it at most by a factor of two;
b. during the flood, it is at most a fifth of that under first come, first served.

Requests of `heavy` that are still queued at the end of a run are aborted, so the TTFT under FCFS is lower than it would
be in a longer flood. The script prints a table. The exit status is 1 if a claim fails.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
from benchmarks.common import StreamedAnswer, bearer_client, print_result, serve, stream_completion
from benchmarks.server_process import write_keys
from rich.table import Table

HEAVY, LIGHT = "heavy", "light"
TIMES_AS_MUCH: Final = 20
POLICIES: Final = ("fcfs", "fair")
VOCABULARY: Final = 20_000
SERVE: Final = (
    "--max-num-seqs",
    "16",
    "--num-threads",
    "1",
    "--kv-cache-memory-bytes",
    "256MiB",
    "--max-model-len",
    "1024",
)


@dataclass(frozen=True, slots=True)
class TwoKeyWorkload:
    """The requests of both keys: each key sends `rate` requests per second, and `heavy` 20 times as many in a flood.

    Output lengths are uniform from half to one and a half times `output_len`, so that requests that start together do
    not all end together.
    """

    rate: float
    seconds: float
    input_len: int
    output_len: int
    seed: int = 0

    def arrivals(self, name: str, times_as_much: int) -> list[float]:
        """Poisson arrival times in seconds since the start. They are equal for equal names."""
        rng = random.Random(f"{self.seed} {name}")
        times = [rng.expovariate(self.rate * times_as_much)]
        while times[-1] < self.seconds:
            times.append(times[-1] + rng.expovariate(self.rate * times_as_much))
        return times[:-1]

    def body(self, rng: random.Random, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": [rng.randrange(VOCABULARY) for _ in range(self.input_len)],
            "max_tokens": rng.randint(max(1, self.output_len // 2), self.output_len * 3 // 2),
            "ignore_eos": True,
            "temperature": 0,
        }


@dataclass(slots=True)
class FairnessRun:
    """The answered requests of one run by key."""

    policy: str
    times_as_much: int
    num_sent: dict[str, int] = field(default_factory=dict)
    calls: dict[str, list[StreamedAnswer]] = field(default_factory=dict)

    def ttft(self, name: str, quantile: float) -> float:
        return float(np.percentile([call.ttft for call in self.calls[name] if call.ttft is not None], quantile))


async def send_all(
    client: httpx.AsyncClient, name: str, workload: TwoKeyWorkload, times_as_much: int, calls: list[StreamedAnswer]
) -> None:
    """Send the requests of one key when they are due, and wait for all answers."""
    rng = random.Random(f"{workload.seed} {name} tokens")
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for due in workload.arrivals(name, times_as_much):
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            call = StreamedAnswer()
            calls.append(call)
            group.create_task(stream_completion(client, workload.body(rng, "m"), call))


async def run_policy(
    url: str, policy: str, secrets: dict[str, str], workload: TwoKeyWorkload, times_as_much: int
) -> FairnessRun:
    """Run the workload. The run ends when all requests of `light` have been answered."""
    result = FairnessRun(policy, times_as_much, calls={HEAVY: [], LIGHT: []})
    clients = {name: bearer_client(url, secret) for name, secret in secrets.items()}
    try:
        heavy = asyncio.create_task(send_all(clients[HEAVY], HEAVY, workload, times_as_much, result.calls[HEAVY]))
        light = asyncio.create_task(send_all(clients[LIGHT], LIGHT, workload, 1, result.calls[LIGHT]))
        while len(result.calls[HEAVY]) < len(workload.arrivals(HEAVY, times_as_much)):
            await asyncio.sleep(0.05)
        await asyncio.wait({heavy}, timeout=0.5)
        heavy.cancel()
        await asyncio.gather(heavy, return_exceptions=True)
        await light
    finally:
        for http in clients.values():
            await http.aclose()
    for name, calls in result.calls.items():
        result.num_sent[name] = len(calls)
        result.calls[name] = [call for call in calls if call.chunk_times]
    if failed := [call.failure for call in result.calls[LIGHT] if call.failure is not None]:
        raise SystemExit(f"{len(failed)} calls of {LIGHT} failed: {failed[0]}")
    return result


async def warm_up(url: str, secrets: dict[str, str], workload: TwoKeyWorkload) -> None:
    async with bearer_client(url, secrets[LIGHT]) as client:
        rng = random.Random("warm up")
        await asyncio.gather(*(stream_completion(client, workload.body(rng, "m"), StreamedAnswer()) for _ in range(16)))


def run_policies(workload: TwoKeyWorkload, options: Sequence[str]) -> list[FairnessRun]:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys.toml"
        secrets = write_keys(key_file, (HEAVY, LIGHT))
        for policy in POLICIES:
            chosen = ["--scheduling-policy", policy, "--api-key-file", str(key_file), "--drain-timeout", "0"]
            with serve(*chosen, *SERVE, "--served-model-name", "m", *options) as url:
                asyncio.run(warm_up(url, secrets, workload))
                runs += [asyncio.run(run_policy(url, policy, secrets, workload, times)) for times in (1, TIMES_AS_MUCH)]
    return runs


def find_run(runs: Sequence[FairnessRun], policy: str, times_as_much: int) -> FairnessRun:
    return next(run for run in runs if (run.policy, run.times_as_much) == (policy, times_as_much))


def claims(runs: Sequence[FairnessRun]) -> dict[str, float]:
    """The two ratios that are claimed to be at most 2 and at most 0.2."""
    flooded = find_run(runs, "fair", TIMES_AS_MUCH).ttft(LIGHT, 50)
    return {
        "fair_flood_over_equal": flooded / find_run(runs, "fair", 1).ttft(LIGHT, 50),
        "fair_flood_over_fcfs_flood": flooded / find_run(runs, "fcfs", TIMES_AS_MUCH).ttft(LIGHT, 50),
    }


def runs_table(runs: Sequence[FairnessRun], workload: TwoKeyWorkload) -> Table:
    table = Table(title=f"TTFT in ms; {LIGHT} sends {workload.rate:g} calls a second for {workload.seconds:g} s")
    for name in ("policy", "heavy sends", "light: answered", "p50", "p99", "heavy: answered", "p50 "):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for item in runs:
        row = [item.policy, "as much" if item.times_as_much == 1 else f"{item.times_as_much} times as much"]
        for name, quantiles in ((LIGHT, (50, 99)), (HEAVY, (50,))):
            row.append(f"{len(item.calls[name])} of {item.num_sent[name]}")
            row += [f"{1000 * item.ttft(name, quantile):.0f}" for quantile in quantiles]
        table.add_row(*row)
    return table


def draw(runs: Sequence[FairnessRun], workload: TwoKeyWorkload, path: Path) -> None:
    """Draw the TTFT of every request of `light` by its arrival time, with and without a flood."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    styles = {
        ("fcfs", TIMES_AS_MUCH): ("#c2452d", "o", "first come, first served; the other key sends 20 times as much"),
        ("fair", TIMES_AS_MUCH): ("#1f6f8b", "o", "fair; the other key sends 20 times as much"),
        ("fair", 1): ("#8a8a8a", ".", "both keys send equally"),
    }
    for (policy, times), (color, marker, label) in styles.items():
        item = find_run(runs, policy, times)
        ttfts = [1000 * (call.ttft or 0.0) for call in item.calls[LIGHT]]
        axes.plot(workload.arrivals(LIGHT, 1), ttfts, marker, color=color, label=label, markersize=6)
        axes.axhline(1000 * item.ttft(LIGHT, 50), color=color, linewidth=0.8)
    axes.set(yscale="log", xlabel="sent, s", ylabel="time to first token, ms")
    figure.suptitle(f"The key that sends {workload.rate:g} calls a second (lines: medians)", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=7.0)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("serve_options", nargs="*", help="options of chairlift serve, after --")
    given = parser.parse_args()
    workload = TwoKeyWorkload(given.rate, given.seconds, given.input_len, given.output_len, given.seed)
    runs = run_policies(workload, given.serve_options)
    ratios = claims(runs)
    results = {
        f"{item.policy}_{item.times_as_much}": {
            name: {"sent": item.num_sent[name], "answered": len(calls), "ttft_p50": item.ttft(name, 50)}
            for name, calls in item.calls.items()
        }
        for item in runs
    }
    record, table = {"runs": results, "claims": ratios}, runs_table(runs, workload)
    print_result("fairness", vars(given), record, [table], as_json=given.json)
    if given.png is not None:
        draw(runs, workload, given.png)
    return 0 if ratios["fair_flood_over_equal"] <= 2 and ratios["fair_flood_over_fcfs_flood"] <= 0.2 else 1


if __name__ == "__main__":
    sys.exit(main())
