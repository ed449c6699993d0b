"""Measures the speed of the simulator: wall seconds for hours of virtual time, with each event sink.

    python benchmarks/simulator_speed.py [--hours 1] [--request-rate 4] [--kv paged] [--seed 0] [--repeats 3]

OPT-13B on an A100-40GB by the roofline, with the 15,728 slots of the vLLM paper (Kwon et al., SOSP'23, section 6.1) and
its ShareGPT lengths; Poisson arrivals. The sinks are timed separately: none, the one that computes metrics
(`RunTally`), and an event log. The script prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path

from chairlift.config import SchedulerConfig
from chairlift.core.factory import KVPool
from chairlift.lab.bench.machine import machine_facts
from chairlift.lab.metrics.run import RunTally
from chairlift.lab.sim.devices import find_device
from chairlift.lab.sim.published_models import model_shape
from chairlift.lab.sim.roofline import Roofline
from chairlift.lab.sim.simulator import SimConfig, SimResult, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.observability.event_log import EventFile

MODEL, DEVICE = "opt-13b", "A100-40GB"
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 983, 16, 2048
SINKS = ("none", "tally", "file")


def workload(hours: float, rate: float, seed: int) -> list[WorkloadRequest]:
    prompt, output = parse_lengths("hist:sharegpt-input"), parse_lengths("hist:sharegpt-output")
    count = max(1, round(hours * 3600 * rate))
    vocab_size = model_shape(MODEL).vocab_size
    return make_workload(seed, count, prompt, output, ArrivalProcess(rate), vocab_size, max_model_len=MAX_MODEL_LEN)


def config(kv: str) -> SimConfig:
    scheduler = SchedulerConfig(MAX_MODEL_LEN, max_num_seqs=256, max_num_batched_tokens=2048)
    return SimConfig(scheduler, KVPool(NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN, kv), model=model_shape(MODEL))


def run(requests: list[WorkloadRequest], kv: str, sink: str) -> tuple[SimResult, RunTally | None]:
    """Run one simulation. Its wall time does not include the creation of the workload."""
    cost_model = Roofline(model_shape(MODEL), find_device(DEVICE))
    gc.collect()
    if sink == "file":
        with tempfile.TemporaryDirectory() as folder:
            file = EventFile(Path(folder, "events.jsonl"))
            try:
                return simulate(requests, config(kv), cost_model, file), None
            finally:
                file.close()
    tally = RunTally() if sink == "tally" else None
    return simulate(requests, config(kv), cost_model, tally), tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="virtual hours in which requests arrive")
    parser.add_argument("--request-rate", type=float, default=4.0)
    parser.add_argument("--kv", default="paged")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sinks", default="none,tally")
    args = parser.parse_args()
    requests = workload(args.hours, args.request_rate, args.seed)
    facts = machine_facts()
    print(f"{facts.cpu}, {facts.num_cores} cores, python {facts.python}, {facts.system}")
    print(
        f"{len(requests):,} requests at {args.request_rate:g}/s, kv {args.kv}, seed {args.seed}, {args.repeats} repeats"
    )
    print(f"{'sink':>6} {'steps':>9} {'virtual s':>10} {'wall s':>8} {'min':>7} {'max':>7} {'steps/s':>9} {'batch':>6}")
    rows = []
    for sink in args.sinks.split(","):
        results = [run(requests, args.kv, sink) for _ in range(args.repeats)]
        wall = [result.wall_seconds for result, _ in results]
        result, tally = results[0]
        median = statistics.median(wall)
        batch = tally.result().mean_batch_size if tally is not None else None
        rows.append(
            {
                "sink": sink,
                "num_steps": result.num_steps,
                "simulated_seconds": result.seconds,
                "wall_seconds": {"median": median, "min": min(wall), "max": max(wall)},
                "steps_per_wall_second": result.num_steps / median,
                "mean_batch_size": batch,
            }
        )
        print(
            f"{sink:>6} {result.num_steps:9,} {result.seconds:10,.1f} {median:8.2f} {min(wall):7.2f} {max(wall):7.2f} "
            f"{result.num_steps / median:9,.0f} {'' if batch is None else f'{batch:.1f}':>6}"
        )
    record = {"benchmark": "simulator_speed", "machine": asdict(facts), "options": vars(args), "rows": rows}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
