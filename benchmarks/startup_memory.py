"""Measures the time of `chairlift serve` from the start of the process to its first token, and its memory.

    python -m benchmarks.startup_memory [--model PATH] [--repeats 3] [--num-requests 32] [--input-len 200]
                                        [--output-len 56] [--json] [-- OPTION OF SERVE ...]

Each repeat starts a server, requests one token as soon as the port answers, and then sends `num_requests` requests at
once, twice. The pool has exactly the blocks that they need, so that it becomes resident completely. The proportional
set size of a process divides each shared page by the number of processes that share it. The sum over the HTTP process
and the engine, minus the pool, is the memory of weights, activations, libraries and interpreters. It is read before and
while requests run, and the maximum counts. The script prints medians of times and the maximum memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx
import psutil
from benchmarks.common import print_result
from rich.table import Table

from chairlift.config import DEFAULT_BLOCK_SIZE
from chairlift.system.memory_amounts import format_memory, parse_memory

READ_INTERVAL_SECONDS = 0.1
START_TIMEOUT_SECONDS = 120
POOL = re.compile(r"KV pool: .* tokens in ([0-9.]+ \w+);")


@dataclass(frozen=True, slots=True)
class ServerStart:
    """The start of one server, and its memory.

    Attributes:
        ready: seconds until the port answers.
        first_token: seconds until a request that is sent then has its first token.
        idle_bytes: proportional set size of all processes after that token.
        front_bytes: part of it in the HTTP process.
        peak_bytes: maximum proportional set size under load.
        pool_bytes: size of K and V.
    """

    ready: float
    first_token: float
    idle_bytes: int
    front_bytes: int
    peak_bytes: int
    pool_bytes: int

    @property
    def peak_without_pool(self) -> int:
        return self.peak_bytes - self.pool_bytes


def proportional_set_size(pid: int) -> int:
    """The bytes of the resident pages of a process, each divided by the number of processes that share it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/smaps_rollup has no Pss")


def total_set_size(pid: int) -> int:
    """The proportional set size of a process and all its descendants in bytes."""
    process = psutil.Process(pid)
    return sum(proportional_set_size(one.pid) for one in (process, *process.children(recursive=True)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def body(args: argparse.Namespace, prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    return {
        "model": "measured",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def command(args: argparse.Namespace, port: int) -> list[str]:
    blocks_per_request = -(-(args.input_len + args.output_len) // DEFAULT_BLOCK_SIZE)
    model = [] if args.model is None else [args.model]
    options = {
        "port": port,
        "served-model-name": "measured",
        "num-kv-blocks": blocks_per_request * args.num_requests,
        "max-num-seqs": args.num_requests,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "chairlift", "serve", *model, *words, *args.serve_options]


async def peak_under_load(args: argparse.Namespace, url: str, pid: int) -> int:
    """Send the requests, and return the maximum memory while they run, in bytes."""
    rng = random.Random(0)
    peak = 0
    async with httpx.AsyncClient(timeout=None) as http:
        for _ in range(2):
            prompts = [[rng.randrange(3, 250) for _ in range(args.input_len)] for _ in range(args.num_requests)]
            posts = [http.post(f"{url}/v1/completions", json=body(args, p, args.output_len)) for p in prompts]
            running = asyncio.gather(*posts)
            while not running.done():
                await asyncio.sleep(READ_INTERVAL_SECONDS)
                peak = max(peak, total_set_size(pid))
            for response in await running:
                response.raise_for_status()
    return peak


def measure(args: argparse.Namespace) -> ServerStart:
    """Start a server, measure it and stop it."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    started = time.perf_counter()
    with subprocess.Popen(command(args, port), stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            wait_until_ready(server, url, started)
            ready = time.perf_counter() - started
            httpx.post(f"{url}/v1/completions", json=body(args, [5, 6, 7], 1), timeout=60).raise_for_status()
            first_token = time.perf_counter() - started
            idle, front = total_set_size(server.pid), proportional_set_size(server.pid)
            peak = asyncio.run(peak_under_load(args, url, server.pid))
        finally:
            server.terminate()
            _, log = server.communicate()
    found = POOL.search(log)
    assert found is not None, log
    return ServerStart(ready, first_token, idle, front, max(idle, peak), parse_memory(found[1]))


def wait_until_ready(server: subprocess.Popen[str], url: str, started: float) -> None:
    while time.perf_counter() - started < START_TIMEOUT_SECONDS:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended: {server.communicate()[1]}")
        try:
            if httpx.get(f"{url}/health", timeout=1).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.01)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_SECONDS} s")


def print_starts(starts: list[ServerStart], args: argparse.Namespace) -> None:
    title = f"start and memory of chairlift serve, {args.num_requests} requests of {args.input_len}+{args.output_len}"
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(("", f"median of {len(starts)}", "worst")):
        table.add_column(column, justify="right" if index else "left")
    for what in ("ready", "first_token"):
        seconds = [getattr(start, what) for start in starts]
        table.add_row(f"{what.replace('_', ' ')} (s)", f"{median(seconds):.2f}", f"{max(seconds):.2f}")
    for what in ("idle_bytes", "front_bytes", "peak_bytes", "pool_bytes", "peak_without_pool"):
        sizes = [getattr(start, what) for start in starts]
        name = what.removesuffix("_bytes").replace("_", " ")
        table.add_row(name, format_memory(int(median(sizes))), format_memory(max(sizes)))
    print_result("startup_memory", vars(args), list(map(asdict, starts)), [table], as_json=args.json)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=56)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("serve_options", nargs="*")
    args = parser.parse_args(arguments)
    print_starts([measure(args) for _ in range(args.repeats)], args)


if __name__ == "__main__":
    main()
