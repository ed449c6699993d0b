"""Compares routers of a simulated cluster on sessions of agents.

    python -m benchmarks.agent_cluster [--replicas 4,16] [--sessions 16] [--rounds 2] [--routers prefix,fewest]
        [--scale 0.0125] [--turns 20] [--pool-share 0.33] [--seeds 0] [--update-delay 0] [--json]
    python -m benchmarks.agent_cluster --replicas 16 --num-sessions 1000 --hours 24 --routers prefix

For each replica --sessions run at a time, and each is followed by others, --rounds in all. With --hours, all
--num-sessions begin at random times within these hours instead. Each replica has the engine's own scheduler, with a
pool and seconds of steps as in `benchmarks.agents`, and the router is that of `chairlift.cluster`, or one of
`benchmarks.simulated_cluster`. Values are medians over the seeds; the last column is the time of the simulations.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
from benchmarks.agents import BLOCK_SIZE, Finished, LinearCost, Tally, Values, mean_context, numbers, session_parser
from benchmarks.common import print_result
from benchmarks.simulated_cluster import ROUTERS, ClusterSimulation
from rich.table import Table

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.lab.sim.simulator import SimConfig
from chairlift.lab.workload.agent_sessions import AgentSessions
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.request import Request


def make_sessions(num_sessions: int, concurrency: int, seed: int, args: argparse.Namespace) -> list[WorkloadRequest]:
    """The turns of all sessions. With --hours they begin at random times, otherwise one when another has ended."""
    concurrency = num_sessions if args.hours else concurrency
    load = AgentSessions(num_sessions, concurrency, args.scale, args.turns, args.max_model_len - 1)
    workload, rng = load.requests(seed, 1000), np.random.default_rng([seed, 11])
    if not args.hours:
        return workload
    return [
        item if item.follows else replace(item, arrival=float(rng.uniform(0, 3600 * args.hours))) for item in workload
    ]


def run(num_replicas: int, router: str, seed: int, args: argparse.Namespace) -> Values:
    """Simulate one router on one cluster."""
    started, concurrency = time.perf_counter(), args.sessions * num_replicas
    num_sessions = args.num_sessions or args.rounds * concurrency
    workload = make_sessions(num_sessions, concurrency, seed, args)
    num_blocks = round(args.pool_share * args.sessions * mean_context(workload) / BLOCK_SIZE)
    scheduler = SchedulerConfig(args.max_model_len, args.max_num_seqs, args.max_num_batched_tokens)
    pool = KVPool(max(args.max_model_len // BLOCK_SIZE + 1, num_blocks), BLOCK_SIZE, args.max_model_len)
    tally = Tally()

    def record(request: Request, now: float) -> None:
        times = request.arrival_time, request.meter.first_token_time, now
        tally.finished.append(Finished(*times, request.num_prompt_tokens, request.meter.num_cached_tokens))

    config, cost_model = SimConfig(scheduler, pool), LinearCost(*args.cost)
    ClusterSimulation(workload, config, cost_model, num_replicas, record, router, seed, args.update_delay).run()
    return {"requests": len(tally.finished)} | tally.values(num_sessions) | {"seconds": time.perf_counter() - started}


def make_table(results: dict[str, Values]) -> Table:
    """A row for each router of each cluster."""
    table = Table("replicas, router", *next(iter(results.values())))
    for name, values in results.items():
        table.add_row(name, *(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in values.values()))
    return table


def medians(runs: Sequence[Values]) -> Values:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def main() -> int:
    parser = session_parser(__doc__)
    parser.add_argument("--replicas", type=numbers(int), default="4,16")
    parser.add_argument("--sessions", type=int, default=16, help="sessions of each replica at a time")
    parser.add_argument("--num-sessions", type=int, help="sessions in all, instead of --rounds")
    parser.add_argument("--hours", type=float, default=0.0, help="hours in which all sessions begin")
    parser.add_argument("--routers", type=lambda text: text.split(","), default=",".join(ROUTERS))
    parser.add_argument("--update-delay", type=float, default=0.0, help="age in seconds of what the router knows")
    parser.add_argument("--seeds", type=numbers(int), default="0")
    args = parser.parse_args()
    results: dict[str, Values] = {}
    for num_replicas in args.replicas:
        for router in args.routers:
            runs = [run(num_replicas, router, seed, args) for seed in args.seeds]
            results[f"{num_replicas}, {router}"] = medians(runs)
            print(f"{num_replicas} replicas, {router}: {runs}", file=sys.stderr)
    print_result("agent_cluster", vars(args), results, [make_table(results)], as_json=args.json, width=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
