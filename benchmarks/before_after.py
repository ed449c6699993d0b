"""Compares the speed of the servers of two checkouts: a burst of streams, and short chats at a steady rate.

    python -m benchmarks.before_after --before-python PYTHON [--rounds 3] [--streams 64] [--chats 1000]
                                      [--chat-seconds 60] [--json] [-- SERVE OPTIONS]

Each round has both sides in alternating order, each with a server of its own and the default model. A burst sends all
streams at once and measures output tokens per second. The chats arrive at random times with the mean rate of `--chats`
in `--chat-seconds`, whatever the server does (open loop), and have a few output tokens each. Of both loads the CPU
seconds of the HTTP process and of the engine are measured, and of the chats also the latency. Both sides of a round get
the same prompts and arrivals.

The script prints medians and ranges, the ratios of each round and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import numpy as np
from benchmarks.common import print_result, ratios, results_table
from benchmarks.http_cost import prompts, stream
from benchmarks.server_process import ServerProcess, checkout_of, server_process
from rich.console import RenderableType
from rich.table import Table

CHAT_TOKENS: Final = 4
WORDS: Final = ("seats", "lifts", "riders", "slopes", "snow", "passes", "queues", "trees")


def run_burst(server: ServerProcess, load: Sequence[list[int]], output_len: int) -> dict[str, float]:
    """Send all prompts at once and wait for their streams."""
    address = urlsplit(server.url)
    before, started = server.cpu_seconds(), time.perf_counter()
    stream((address.hostname or "", address.port or 0), list(load), output_len)
    seconds, after = time.perf_counter() - started, server.cpu_seconds()
    num_tokens = len(load) * output_len
    return {
        "burst: output tokens/s": num_tokens / seconds,
        "burst: CPU s of the HTTP process": after["http"] - before["http"],
        "burst: CPU s of the engine": after["engine"] - before["engine"],
    }


async def run_chats(server: ServerProcess, arrivals: Sequence[float], seed: int) -> dict[str, float]:
    """Send a chat at each arrival time, and wait for all answers."""
    rng = random.Random(seed)
    bodies = [_chat(rng) for _ in arrivals]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    latencies: list[float] = []
    before, started = server.cpu_seconds(), time.perf_counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits, trust_env=False) as client:

        async def call(body: dict[str, Any]) -> None:
            sent = time.perf_counter()
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()
            latencies.append(time.perf_counter() - sent)

        async with asyncio.TaskGroup() as group:
            for due, body in zip(arrivals, bodies, strict=True):
                await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
                group.create_task(call(body))
        seconds, after = time.perf_counter() - started, server.cpu_seconds()
    thousands = len(arrivals) / 1000
    return {
        "chats: answers a minute": 60 * len(latencies) / seconds,
        "chats: latency p50, ms": 1e3 * median(latencies),
        "chats: latency p99, ms": 1e3 * float(np.percentile(latencies, 99)),
        "chats: CPU s of the HTTP process per 1,000": (after["http"] - before["http"]) / thousands,
        "chats: CPU s of the engine per 1,000": (after["engine"] - before["engine"]) / thousands,
    }


def _chat(rng: random.Random) -> dict[str, Any]:
    content = " ".join(rng.choices(WORDS, k=12))
    return {"messages": [{"role": "user", "content": content}], "max_tokens": CHAT_TOKENS, "temperature": 0}


def arrival_times(count: int, seconds: float, seed: int) -> list[float]:
    """Arrival times of a Poisson process with this number of arrivals."""
    rng = random.Random(seed)
    return sorted(rng.uniform(0.0, seconds) for _ in range(count))


def run_side(python: str | None, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Measure both loads on a server of its own, after a short load that is not counted."""
    with server_process(*options.serve_options, python=python) as server:
        run_burst(server, prompts(4, 8, seed + 1000), 4)
        asyncio.run(run_chats(server, [0.0] * 4, seed + 1000))
        load = prompts(options.streams, options.input_len, seed)
        arrivals = arrival_times(options.chats, options.chat_seconds, seed)
        return {
            **run_burst(server, load, options.output_len),
            **asyncio.run(run_chats(server, arrivals, seed)),
        }


def ratio_table(results: dict[str, list[dict[str, float]]]) -> Table:
    """After divided by before, of each round."""
    table = Table("after / before", "median", "each round")
    for key in results["after"][0]:
        found = change_of(results, key)
        table.add_row(key, f"{median(found):.3f}", ", ".join(f"{value:.3f}" for value in found))
    return table


def change_of(results: dict[str, list[dict[str, float]]], key: str) -> list[float]:
    """After divided by before of each round; not a number where before is 0, as CPU time of a short load may be."""
    after, before = ([row[key] for row in results[side]] for side in ("after", "before"))
    return ratios(after, [value or math.nan for value in before])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--before-python", required=True, help="the interpreter of the other checkout")
    parser.add_argument("--after-python", help="the interpreter of the second checkout; this one by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--chat-seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    parser.add_argument("serve_options", nargs="*", help="options of chairlift serve, after --")
    given = parser.parse_args()
    pythons = {"before": given.before_python, "after": given.after_python}
    results: dict[str, list[dict[str, float]]] = {side: [] for side in pythons}
    for number in range(given.rounds):
        for side in sorted(pythons, reverse=number % 2 == 0):  # before, after; after, before; ...
            results[side].append(run_side(pythons[side], given, given.seed + number))
            print(f"round {number + 1}, {side}: {json.dumps(results[side][-1])}", file=sys.stderr)
    served = {side: asdict(checkout_of(python)) for side, python in pythons.items()}
    change = {key: change_of(results, key) for key in results["after"][0]}
    record = {"served": served, "rounds": results, "after_over_before": change}
    parts: list[RenderableType] = [f"{side}: {code['version']} at {code['commit']}" for side, code in served.items()]
    parts += [results_table(results, "medians and ranges"), ratio_table(results)]
    shown = {**vars(given), "serve_options": " ".join(given.serve_options)}
    print_result("before_after", shown, record, parts, as_json=given.json)
    if not given.json:
        print(json.dumps({"before_after": record, "seed": given.seed}))


if __name__ == "__main__":
    main()
