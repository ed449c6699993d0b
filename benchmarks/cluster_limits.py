"""Measures the rate that a key with 10 requests per second gets over two ingresses and three replicas.

    python -m benchmarks.cluster_limits [--seconds 20] [--json]

The key may send 600 requests per minute. They are used up at once; then 40 requests per second are sent, and after five
seconds those that are accepted are counted: at first, the ingresses reject what they accepted too much of the burst.
The requests only count tokens, so that the engines do not limit them.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
from benchmarks.cluster_faults import OPTIONS
from benchmarks.common import print_result
from benchmarks.ray_cluster import Cluster

from chairlift.server.access.keys import digest

SETTLE_SECONDS: Final = 5.0
SECRET: Final = "team-secret-0123456789abcdef"
KEYS: Final = f"""
[[keys]]
name = "team"
hash = "{digest(SECRET).hex()}"
requests_per_minute = 600
"""


async def count_accepted(url: str, seconds: float) -> tuple[int, float]:
    """The number of accepted requests, and the measured seconds."""
    headers = {"Authorization": f"Bearer {SECRET}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:

        async def call() -> int:
            return (await client.post("/tokenize", json={"prompt": "x"})).status_code

        while 429 not in await asyncio.gather(*(call() for _ in range(40))):
            pass

        async def count(seconds: float) -> tuple[int, float]:
            started, calls = time.monotonic(), []
            while time.monotonic() - started < seconds:
                calls.append(asyncio.create_task(call()))
                await asyncio.sleep(0.025)
            statuses = await asyncio.gather(*calls)
            return statuses.count(200), time.monotonic() - started

        await count(SETTLE_SECONDS)
        return await count(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.write_text(KEYS)
        cluster = Cluster()
        cluster.start()
        try:
            cluster.deploy({**OPTIONS, "api-key-file": str(keys)}, replicas=3, ingresses=2)
            accepted, seconds = asyncio.run(count_accepted(cluster.url, arguments.seconds))
        finally:
            cluster.stop()
    record = {"accepted": accepted, "seconds": seconds, "per_second": accepted / seconds}
    line = f"{accepted / seconds:.2f} requests/s in {seconds:.0f} s; the limit is 10"
    print_result("cluster_limits", vars(arguments), record, [line], as_json=arguments.json)


if __name__ == "__main__":
    main()
