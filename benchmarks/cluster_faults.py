"""Breaks parts of a real cluster on Ray Serve under load, and counts what becomes of every request.

    python -m benchmarks.cluster_faults [--scenarios replica ingress hung update scale] [--json]

Each scenario sends 20 streams and, behind them, 20 requests that have to wait, and then breaks something:

    replica   kill -9 of one of two replicas
    ingress   kill -9 of one of two ingresses
    hung      SIGSTOP of one of two replicas
    update    the configuration changes (serve deploy) while requests are sent all the time
    scale     one to three replicas and back while requests are sent all the time

A request is finished, has failed with an error that says what happened, has failed because its connection was closed,
or is lost: it has no answer within its time limit, or an answer that stops without an error. None may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import httpx
from benchmarks.common import print_result
from benchmarks.ray_cluster import Cluster, replica_processes
from rich.table import Table

SCENARIOS: Final = ("replica", "ingress", "hung", "update", "scale")
OUTCOMES: Final = ("finished", "error", "closed", "lost")
NUM_STREAMS: Final = 20
OUTPUT_LEN: Final = 96
TIMEOUT: Final = 180.0
OPTIONS: Final = {"num-threads": 1, "num-kv-blocks": 2048, "max-num-seqs": 10}


def connect(cluster: Cluster, max_connections: int) -> httpx.AsyncClient:
    """A client with its time limit for every read."""
    limits = httpx.Limits(max_connections=max_connections)
    return httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT, limits=limits)


async def send(client: httpx.AsyncClient, prompt: str, output_len: int = OUTPUT_LEN) -> str:
    """Send a stream and return what became of it."""
    body = {"prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "stream": True, "temperature": 0}
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return "error" if text.strip() else "lost"
            return await _read_stream(response)
    except httpx.TimeoutException:
        return "lost"
    except httpx.HTTPError:
        return "closed"


async def _read_stream(response: httpx.Response) -> str:
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return "finished"
        if line.startswith("data: ") and "error" in json.loads(line[6:]):
            return "error"
    return "lost"


async def send_burst(cluster: Cluster, act: Callable[[], Any], delay: float = 1.5) -> Counter[str]:
    """Send streams and queued requests, and act when the streams have output."""
    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=TIMEOUT, limits=httpx.Limits(max_connections=64)
    ) as client:
        streams = [asyncio.create_task(send(client, f"Story {index}:")) for index in range(NUM_STREAMS)]
        await asyncio.sleep(0.3)
        queued = [asyncio.create_task(send(client, f"Letter {index}:")) for index in range(NUM_STREAMS)]
        await asyncio.sleep(delay)
        await asyncio.to_thread(act)
        return Counter(await asyncio.gather(*streams, *queued))


async def send_meanwhile(cluster: Cluster, acts: list[Callable[[], Any]], pause: float) -> Counter[str]:
    """Send requests all the time while the acts are carried out one after another."""
    results: list[asyncio.Task[str]] = []
    is_over = asyncio.Event()

    async def send_all(client: httpx.AsyncClient) -> None:
        while not is_over.is_set():
            results.append(asyncio.create_task(send(client, f"Story {len(results)}:", 32)))
            await asyncio.sleep(0.15)

    async with httpx.AsyncClient(
        base_url=cluster.url, timeout=TIMEOUT, limits=httpx.Limits(max_connections=512)
    ) as client:
        sending = asyncio.create_task(send_all(client))
        for act in acts:
            await asyncio.sleep(pause)
            await asyncio.to_thread(act)
        await asyncio.sleep(pause)
        is_over.set()
        await sending
        return Counter(await asyncio.gather(*results))


def run_scenario(cluster: Cluster, name: str) -> Counter[str]:
    """Deploy what a scenario needs, and run it."""

    def signal_one(deployment: str, number: int) -> Callable[[], None]:
        return lambda: replica_processes(deployment)[0].send_signal(number)

    if name == "replica":
        cluster.deploy(OPTIONS, replicas=2)
        return asyncio.run(send_burst(cluster, signal_one("engine", signal.SIGKILL)))
    if name == "ingress":
        cluster.deploy(OPTIONS, replicas=2, ingresses=2)
        return asyncio.run(send_burst(cluster, signal_one("ingress", signal.SIGKILL)))
    if name == "hung":
        cluster.deploy(OPTIONS, replicas=2, health_check_timeout=5.0)
        return asyncio.run(send_burst(cluster, signal_one("engine", signal.SIGSTOP)))
    if name == "update":
        cluster.deploy(OPTIONS, replicas=2)
        update = lambda: cluster.deploy({**OPTIONS, "max-num-seqs": 12}, replicas=2)  # noqa: E731
        return asyncio.run(send_meanwhile(cluster, [update], 3.0))
    cluster.deploy(OPTIONS, replicas=1)
    steps = [lambda: cluster.deploy(OPTIONS, replicas=3), lambda: cluster.deploy(OPTIONS, replicas=1)]
    return asyncio.run(send_meanwhile(cluster, steps, 3.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    rows: dict[str, Counter[str]] = {}
    cluster = Cluster()
    cluster.start()
    try:
        for name in arguments.scenarios:
            rows[name] = run_scenario(cluster, name)
    finally:
        cluster.stop()
    counts = {name: {"sent": row.total(), **{key: row[key] for key in OUTCOMES}} for name, row in rows.items()}
    table = Table("scenario", "sent", *OUTCOMES)
    for name, count in counts.items():
        table.add_row(name, *map(str, count.values()))
    print_result("cluster_faults", vars(arguments), counts, [table], as_json=arguments.json)


if __name__ == "__main__":
    main()
