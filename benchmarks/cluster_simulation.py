"""Simulates clusters of replicas with different routers, and with stale and lost updates of their prefix caches.

    python -m benchmarks.cluster_simulation [--replicas 4 16 64 256] [--conversations 24] [--seed 0] [--json]
    python -m benchmarks.cluster_simulation --trace AzureLLMInferenceTrace_conv.csv [--trace-speed 2] [--replicas 16]
        [--trace-limit 4000] [--common-tokens 32] [--cases prefix random]

Each replica is an 8B model on an H100 by the roofline, with the engine's own scheduler and a KV pool of 64,000 slots.
For each replica there are 24 conversations of four turns, which begin at random times within a minute: a system prompt
of 1,024 tokens, of which there are half as many as replicas, and 128 new tokens and 128 output tokens in each turn. The
routers are those of `benchmarks.simulated_cluster.cluster`.

With `--trace` the requests are those of a trace, and each replica receives `--trace-speed` times the rate of the trace.
All prompts begin with the same `--common-tokens`, like those of a chat template. A further case is the failure of two
replicas.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from benchmarks.common import print_result
from benchmarks.simulated_cluster.cluster import ClusterSimulation
from benchmarks.simulated_cluster.cluster_config import ClusterConfig, Failure
from benchmarks.simulated_cluster.conversation_feed import ConversationFeed
from rich.table import Table

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.lab.sim.devices import find_device
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.request_feed import RequestFeed
from chairlift.lab.workload.synthetic import synthetic_tokens
from chairlift.lab.workload.traces.formats import TraceOptions
from chairlift.lab.workload.traces.trace_loader import read_trace

MODEL: Final = "llama-3-8b"
DEVICE: Final = "H100-SXM"
LIMITS: Final = SchedulerConfig(16384, max_num_seqs=64, max_num_batched_tokens=2048)
ENGINE: Final = SimConfig(LIMITS, KVPool(4000, 16, 16384))
SYSTEM_TOKENS, TURN_TOKENS, OUTPUT_TOKENS, NUM_TURNS = 1024, 128, 128, 4
ARRIVAL_SECONDS: Final = 60.0
CASES: Final[dict[str, dict[str, Any]]] = {
    "prefix": {},
    "prefix, 1 s stale": {"update_delay": 1.0},
    "prefix, 10 % lost": {"update_loss": 0.1},
    "prefix, 8 routers, 0.5 s stale": {"num_routers": 8, "update_delay": 0.5},
    "pow2": {"router": "pow2"},
    "random": {"router": "random"},
}
FAILURES: Final = (Failure(20.0, 0), Failure(25.0, 1))
TRACE_CASES: Final[dict[str, dict[str, Any]]] = {
    **CASES,
    "prefix, 2 replicas fail": {"failures": FAILURES},
}


def conversations(replicas: int, per_replica: int, seed: int) -> ConversationFeed:
    """The conversations of a cluster."""
    source = random.Random(seed)
    found = []
    for number in range(replicas * per_replica):
        system = synthetic_tokens(f"system {number % max(1, replicas // 2)}", SYSTEM_TOKENS)
        prompts = [synthetic_tokens(f"turn {number} {turn}", TURN_TOKENS) for turn in range(NUM_TURNS)]
        arrivals = [source.uniform(0, ARRIVAL_SECONDS), *(source.expovariate(1 / 5) for _ in range(NUM_TURNS - 1))]
        columns = zip(arrivals, [system + prompts[0], *prompts[1:]], strict=True)
        found.append([WorkloadRequest(f"{number}.{turn}", *each, OUTPUT_TOKENS) for turn, each in enumerate(columns)])
    return ConversationFeed(found)


def trace_workload(path: Path, limit: int | None, speed: float, common_tokens: int = 0) -> list[WorkloadRequest]:
    """The first requests of a trace, whose time passes `speed` times as fast, behind tokens that all of them share."""
    common = synthetic_tokens("common", common_tokens) if common_tokens else b""
    return [
        replace(request, arrival=request.arrival / speed, prompt_token_ids=common + bytes(request.prompt_token_ids))
        for request in read_trace(path, TraceOptions(limit))
    ]


def run(replicas: int, case: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The results of one simulation."""
    requests: RequestFeed | list[WorkloadRequest]
    if arguments.trace is not None:
        speed = arguments.trace_speed * replicas
        requests = trace_workload(arguments.trace, arguments.trace_limit, speed, arguments.common_tokens)
    else:
        requests = conversations(replicas, arguments.conversations, arguments.seed)
    cost_model = Roofline(model_shape(MODEL), find_device(DEVICE))
    config = ClusterConfig(ENGINE, replicas, seed=arguments.seed, **TRACE_CASES[case])
    result = ClusterSimulation(requests, config, cost_model).run()
    ended = result.num_finished + result.num_lost + result.num_rejected
    assert ended == result.num_requests, "no request vanishes"
    return {
        "replicas": replicas,
        "router": case,
        "hit_rate": result.hit_rate,
        "ttft_p50_ms": median(result.ttfts) * 1e3,
        "ttft_p99_ms": quantiles(result.ttfts, n=100)[-1] * 1e3,
        "finished": result.num_finished,
        "lost": result.num_lost,
        "simulated_seconds_per_second": result.seconds / result.wall_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--trace", type=Path, help="a trace in a format of `chairlift simulate --trace`")
    parser.add_argument("--trace-speed", type=float, default=1.0)
    parser.add_argument("--trace-limit", type=int, help="the number of requests; default: all")
    parser.add_argument("--common-tokens", type=int, default=0, help="tokens at the start of all prompts of the trace")
    parser.add_argument("--cases", nargs="+", choices=list(TRACE_CASES), help="the cases to simulate; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    cases = arguments.cases or (CASES if arguments.trace is None else TRACE_CASES)
    rows = [run(replicas, case, arguments) for replicas in arguments.replicas for case in cases]
    table = Table("replicas", "router", "hit rate", "TTFT p50 (ms)", "TTFT p99 (ms)", "finished", "lost", "speed")
    for row in rows:
        table.add_row(
            str(row["replicas"]),
            row["router"],
            f"{row['hit_rate']:.1%}",
            f"{row['ttft_p50_ms']:.1f}",
            f"{row['ttft_p99_ms']:.0f}",
            str(row["finished"]),
            str(row["lost"]),
            f"{row['simulated_seconds_per_second']:.1f}",
        )
    print_result("cluster_simulation", vars(arguments), rows, [table], as_json=arguments.json)


if __name__ == "__main__":
    main()
