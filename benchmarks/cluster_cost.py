"""Measures what a cluster costs: an ingress with one replica against the plain server, with the same threads.

    python -m benchmarks.cluster_cost [--rounds 3] [--streams 16] [--requests 64] [--output-len 64] [--json]

Each round starts and measures four servers one after another, because an idle Ray takes computing time from the others:
the plain server, `serve --replicas 1` (its HTTP process routes to the replica), the application `chairlift.cluster:app`
behind HAProxy with the settings of deploy/ray/cluster.env, and the same behind Ray Serve's own proxy with its defaults.
A measurement sends single requests with one output token (time to first token), and then streams.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from statistics import median, quantiles
from typing import Any, Final

import httpx
from benchmarks.common import print_result, results_table, serve

OPTIONS: Final = {"num-threads": 1, "num-kv-blocks": 4096, "max-num-batched-tokens": 256}
NUM_SINGLE: Final = 40


@contextlib.contextmanager
def serve_plain(*arguments: str) -> Iterator[str]:
    """A server as a process; yields its address."""
    with serve(*(f"--{name}={value}" for name, value in OPTIONS.items()), *arguments) as url:
        yield url


@contextlib.contextmanager
def serve_on_ray(*arguments: str) -> Iterator[str]:
    """The application on Ray Serve as a process; yields its address."""
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "benchmarks.ray_cluster", *options, *arguments]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment(), text=True
        )
        assert process.stdout is not None
        try:
            url = next((line.strip() for line in process.stdout if line.startswith("http://")), None)
            if url is None:
                log.seek(0)
                raise SystemExit(f"{' '.join(command)} has ended:\n{log.read()[-4000:]}")
            wait_until_ready(url)
            yield url
        finally:
            process.communicate(timeout=120)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{url} is not ready after 120 s")


async def measure(url: str, round_number: int, arguments: argparse.Namespace) -> dict[str, float]:
    """The times to the first token of single requests, and the throughput and gaps of streams."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        single = []
        for index in range(NUM_SINGLE):
            started = time.perf_counter()
            await client.post("/v1/completions", json=body(f"{round_number} single {index}:", 1))
            single.append(time.perf_counter() - started)
        seats = asyncio.Semaphore(arguments.streams)
        gaps: list[float] = []

        async def stream(index: int) -> None:
            async with seats:
                last = None
                request = {**body(f"{round_number} story {index}:", arguments.output_len), "stream": True}
                async with client.stream("POST", "/v1/completions", json=request) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            now = time.perf_counter()
                            if last is not None:
                                gaps.append(now - last)
                            last = now

        started = time.perf_counter()
        await asyncio.gather(*(stream(index) for index in range(arguments.requests)))
        seconds = time.perf_counter() - started
    return {
        "ttft_p50_ms": median(single) * 1e3,
        "ttft_p95_ms": quantiles(single, n=20)[-1] * 1e3,
        "itl_p50_ms": median(gaps) * 1e3,
        "tokens_per_second": arguments.requests * arguments.output_len / seconds,
    }


def body(prompt: str, output_len: int) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "temperature": 0}


SYSTEMS: Final[dict[str, Callable[[], AbstractContextManager[str]]]] = {
    "plain": serve_plain,
    "replicas 1": partial(serve_plain, "--replicas=1"),
    "HAProxy": serve_on_ray,
    "Ray Serve's proxy": partial(serve_on_ray, "--python-proxy"),
}


def run(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The results of all rounds by system."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    warm_up = argparse.Namespace(**{**vars(arguments), "requests": arguments.streams})
    for number, (name, start) in itertools.product(range(arguments.rounds), SYSTEMS.items()):
        with start() as url:
            asyncio.run(measure(url, -1, warm_up))
            results[name].append(asyncio.run(measure(url, number, arguments)))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    results = run(arguments)
    print_result("cluster_cost", vars(arguments), results, [results_table(results)], as_json=arguments.json)


if __name__ == "__main__":
    main()
