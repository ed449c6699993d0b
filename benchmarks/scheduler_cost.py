"""Measures the cost of the scheduler: microseconds of `schedule` and `update` per running request and step.

    python -m benchmarks.scheduler_cost [--running 10,100,1000,10000] [--waiting 0,100000] [--policies fcfs]
                                        [--steps 300] [--repeats 5] [--json]

Every step has its result at once, so only the scheduler runs, without event sinks. Requests belong to ten tenants in
turn. Under mlfq the waiting requests take seats, so its cost includes a preemption and an admission in most steps. The
script prints a table; ratios are to the first policy.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from itertools import product

from benchmarks.common import print_result
from rich.table import Column, Table

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool, make_kv_cache_manager, make_scheduler
from chairlift.core.scheduler import Scheduler
from chairlift.outputs import ModelRunnerOutput
from chairlift.policy_class import default_length_predictor
from chairlift.request import Request
from chairlift.sampling_params import SamplingParams

PROMPT = 20
NUM_TENANTS = 10


def make_busy_scheduler(policy: str, running: int, waiting: int, steps: int) -> Scheduler:
    """Create a scheduler with `running` decoding requests in all seats, and `waiting` more in the queue."""
    max_model_len = PROMPT + steps + 64
    predictor = "none" if default_length_predictor(policy) == "none" else "max_tokens"
    config = SchedulerConfig(
        max_model_len,
        max_num_seqs=running,
        max_num_batched_tokens=running * PROMPT,
        scheduling_policy=policy,
        length_predictor=predictor,
    )
    blocks = running * (max_model_len // 16 + 1)
    scheduler = make_scheduler(config, make_kv_cache_manager(KVPool(blocks, 16, max_model_len), True))
    params = SamplingParams(max_tokens=steps + 32)
    for index in range(running + waiting):
        prompt = [index % 50_000, *range(1, PROMPT)]
        scheduler.add(Request(f"r{index}", prompt, params, steps + 32, tenant=f"tenant-{index % NUM_TENANTS}"))
    return scheduler


def time_step(scheduler: Scheduler) -> float:
    """Measure the seconds of `schedule` and `update` in one step."""
    start = time.perf_counter()
    output = scheduler.schedule(0.0)
    scheduled = time.perf_counter()
    assert output is not None
    result = ModelRunnerOutput(output.step, {rid: [7] for rid in output.num_scheduled_tokens})
    ready = time.perf_counter()
    scheduler.update(result, 0.0)
    return time.perf_counter() - ready + scheduled - start


def microseconds(policy: str, running: int, waiting: int, steps: int) -> float:
    scheduler = make_busy_scheduler(policy, running, waiting, steps)
    time_step(scheduler)
    assert scheduler.num_running == running
    gc.collect()
    seconds = sum(time_step(scheduler) for _ in range(steps))
    return seconds / steps / running * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", default="10,100,1000,10000")
    parser.add_argument("--waiting", default="0,100000")
    parser.add_argument("--policies", default="fcfs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    headers = ("running", "waiting", "policy", "µs/request/step", "min", "max", "ratio")
    rows, table = [], Table(*(Column(header, justify="right") for header in headers))
    sizes = product(map(int, args.running.split(",")), map(int, args.waiting.split(",")))
    for running, waiting in sizes:
        policies = args.policies.split(",")
        rounds = [[microseconds(each, running, waiting, args.steps) for each in policies] for _ in range(args.repeats)]
        medians = [statistics.median(samples) for samples in zip(*rounds, strict=True)]
        for policy, median, samples in zip(policies, medians, zip(*rounds, strict=True), strict=True):
            row = {"running": running, "waiting": waiting, "policy": policy, "median_us": round(median, 3)}
            rows.append({**row, "ratio": round(median / medians[0], 3)})
            times = (median, min(samples), max(samples), median / medians[0])
            table.add_row(str(running), str(waiting), policy, *(f"{value:.2f}" for value in times))
    print_result("scheduler_cost", vars(args), rows, [table], as_json=args.json)


if __name__ == "__main__":
    main()
