"""Compares routers on a real cluster: conversations with shared system prompts on two replicas.

    python -m benchmarks.cluster_routing [--rounds 3] [--conversations 16] [--turns 4] [--seed 0] [--json]

The routers alternate: Chairlift's, Ray Serve's default, and Ray's prefix-aware one (see `ray_routers`). Each round
deploys the application again, so that all prefix caches are empty. A conversation has one of four system prompts of
about 300 tokens, and sends its next turn when it has read the answer to the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from statistics import median, quantiles
from typing import Any, Final

import httpx
from benchmarks.common import print_result, results_table
from benchmarks.ray_cluster import Cluster

OPTIONS: Final = {"num-threads": 1, "max-num-seqs": 16, "num-kv-blocks": 4096, "max-num-batched-tokens": 256}
ROUTERS: Final = {
    "Chairlift": "chairlift.cluster.request_router:PrefixAwareRouter",
    "Ray's default": "benchmarks.ray_routers:RayDefaultRouter",
    "Ray's prefix-aware": "benchmarks.ray_routers:RayPrefixRouter",
}
WORDS: Final = ("river", "stone", "cloud", "paper", "engine", "winter", "garden", "music", "bridge", "letter")


async def converse(client: httpx.AsyncClient, number: int, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """One conversation; returns the time to the first token and the cached share of each turn."""
    source = random.Random(f"{arguments.seed} {number}")
    system = " ".join(random.Random(number % 4).choices(WORDS, k=250))
    messages = [{"role": "system", "content": system}]
    await asyncio.sleep(source.uniform(0, 4))
    turns = []
    for _ in range(arguments.turns):
        messages.append({"role": "user", "content": " ".join(source.choices(WORDS, k=30))})
        body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
        started, first, text = time.perf_counter(), 0.0, ""
        usage: dict[str, Any] = {}
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                for choice in chunk["choices"]:
                    content = choice["delta"].get("content") or ""
                    first = first or (time.perf_counter() - started if content else 0.0)
                    text += content
        messages.append({"role": "assistant", "content": text})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turns.append({"ttft": first, "cached": cached, "prompt": usage["prompt_tokens"]})
        await asyncio.sleep(source.uniform(0.2, 1.0))
    return turns


async def measure(url: str, arguments: argparse.Namespace) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=64)) as client:
        found = await asyncio.gather(*(converse(client, each, arguments) for each in range(arguments.conversations)))
    turns = [turn for turns in found for turn in turns]
    ttfts = [turn["ttft"] for turn in turns]
    return {
        "hit_rate": sum(turn["cached"] for turn in turns) / sum(turn["prompt"] for turn in turns),
        "ttft_p50_ms": median(ttfts) * 1e3,
        "ttft_p95_ms": quantiles(ttfts, n=20)[-1] * 1e3,
    }


def deploy(cluster: Cluster, seed: int, router: str) -> None:
    """Deploy two replicas with a router. Another seed is another configuration, so that new replicas are started."""
    from chairlift.cluster import ray_deployments

    forget_prefixes()
    ray_deployments.ROUTER_CLASS = router  # type: ignore[misc]
    cluster.deploy({**OPTIONS, "seed": seed}, replicas=2)


def forget_prefixes() -> None:
    """Stop the actor with the prefixes of Ray's router. It would choose replicas of an earlier round."""
    import ray

    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"] == "LlmPrefixTreeActor":
            ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ROUTERS}
    cluster = Cluster()
    cluster.start()
    try:
        for seed, name in enumerate(list(ROUTERS) * arguments.rounds):
            deploy(cluster, seed, ROUTERS[name])
            results[name].append(asyncio.run(measure(cluster.url, arguments)))
    finally:
        cluster.stop()
    print_result("cluster_routing", vars(arguments), results, [results_table(results)], as_json=arguments.json)


if __name__ == "__main__":
    main()
