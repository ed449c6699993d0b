"""Compares the orders of the queue under Poisson arrivals, on an engine and in a simulation of the same engine.

    python -m benchmarks.queue_order [--trace TRACE.csv] [--policies POLICY,...] [--loads 0.7,0.9,1.1]
        [--seeds 0,1,2] [--num-prompts 200] [--max-num-seqs 8] [--goodput "ttft:2000 tpot:100"]
        [--simulation-only] [--json]

The capacity is measured first: the requests per second of the first policy when all requests arrive at once. A load is
a share of it. For each load and seed all policies serve the same requests; each seed begins with the next policy, so
that a drift of the machine's speed meets each of them. Lengths are drawn from the trace (such as one of Azure's), and
scaled by one factor with which the longest request fits --max-model-len; without a trace they are log-normal with the
published medians of Azure's conversations, 1,020 prompt and 129 output tokens. The traces have no clients: each request
is assigned to one of four tenants at random, with different shares, by the seed. Outputs are forced to their lengths.

The simulation replays the same arrivals on a cost model that is fitted to the steps of the capacity run. The tables
have means over the seeds, and the ratio of the mean latency to that of the first policy. The service gap is the largest
difference between the services that two tenants received while both had waiting requests, in all runs. `fair` and
`dlpm` bound it (see `lab.presets.service_gap`), and the exit status is 1 if a run exceeds its bound.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from benchmarks.common import print_result
from benchmarks.waiting_service import WaitingServiceTally, service_bound
from rich.table import Table

from chairlift.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from chairlift.engine.startup.factory import build_engine
from chairlift.engine.startup.loaded_model import LoadedDecoder, load_decoder
from chairlift.events import EngineStarted, EventBroadcaster, EventList
from chairlift.lab.bench.driver import drive_all_at_once, run_forced
from chairlift.lab.bench.policies import ComparedPolicy, parse_policies
from chairlift.lab.bench.simulation import sim_config_from_recording
from chairlift.lab.metrics.run import RunMetrics, RunTally, summarize
from chairlift.lab.sim.cost_model import CostModel
from chairlift.lab.sim.fitted_cost_model import fit_cost_model
from chairlift.lab.sim.simulator import simulate
from chairlift.lab.workload.arrivals import ArrivalProcess, with_arrivals
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.traces import read_trace
from chairlift.slo import SLO, parse_slo

POLICIES: Final = "fcfs,srpt:oracle,srpt:max_tokens,srpt:history,mlfq,fair,dlpm,edf"
PROMPTS, OUTPUTS = parse_lengths("lognormal:1020,1.0,16..8192"), parse_lengths("lognormal:129,0.9,4..2048")
TENANT_SHARES: Final = {"a": 0.5, "b": 0.25, "c": 0.15, "d": 0.1}
"""The share of the requests that each tenant sends."""
CAPACITY_SEED: Final = 10_000
SHOWN: Final = {
    "e2e_latency_mean": "latency mean, s",
    "e2e_latency_p50": "p50",
    "e2e_latency_p99": "p99",
    "ttft_mean": "TTFT mean, s",
    "ttft_p50": "p50",
    "ttft_p99": "p99",
    "length_error_mean": "length error",
    "preemptions": "preemptions",
    "goodput": "goodput, /s",
    "slo_attainment": "within SLO",
    "service_gap": "service gap, largest",
    "service_bound": "bound",
}

Values = dict[str, float]
Lengths = Sequence[tuple[int, int]]
"""Prompt and output lengths of requests."""

SERVICE: Final = ("service_gap", "service_bound")
"""The values that are of one run, and not means over the seeds."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The metrics of a policy at a load over the seeds; `source` is "engine" or "simulation"."""

    source: str
    load: float
    policy: str
    values: Values


# -- workload ------------------------------------------------------------------------------------------------------


def read_lengths(trace: Path | None, max_model_len: int) -> Lengths:
    """The lengths of a trace, or of the published distributions, scaled so that the longest request fits."""
    if trace is None:
        rng = np.random.default_rng(0)
        lengths = list(zip(PROMPTS.sample(rng, 5000), OUTPUTS.sample(rng, 5000), strict=True))
    else:
        lengths = [(len(item.prompt_token_ids), item.output_len) for item in read_trace(trace)]
    scale = min(1.0, (max_model_len - 2) / max(map(sum, lengths)))
    return [(max(1, round(scale * prompt)), max(1, round(scale * output))) for prompt, output in lengths]


def draw_requests(lengths: Lengths, count: int, seed: int, vocab_size: int, slo: SLO) -> list[WorkloadRequest]:
    """Draw requests that arrive at once, with random tokens and `max_tokens` of twice the mean output."""
    rng = np.random.default_rng([seed, 1])
    limit = round(2 * fmean(output for _, output in lengths))
    drawn = [lengths[index] for index in rng.integers(len(lengths), size=count)]
    shares = list(TENANT_SHARES.values())
    tenants = np.random.default_rng([seed, 3]).choice(list(TENANT_SHARES), size=count, p=shares).tolist()
    return [
        WorkloadRequest(
            f"s{seed}-{index}",
            0.0,
            rng.integers(vocab_size, size=prompt).tolist(),
            output,
            max(limit, output),
            tenant=tenants[index],
            slo=slo,
        )
        for index, (prompt, output) in enumerate(drawn)
    ]


def at_rate(requests: Sequence[WorkloadRequest], rate: float, seed: int) -> list[WorkloadRequest]:
    return with_arrivals(requests, ArrivalProcess(rate), np.random.default_rng([seed, 2]))


# -- runs ----------------------------------------------------------------------------------------------------------


class Comparison:
    """Runs all policies on one loaded model, and in the simulation of its engine."""

    def __init__(self, config: EngineConfig, policies: Sequence[ComparedPolicy]) -> None:
        self._loaded: LoadedDecoder = load_decoder(config)
        self._configs = {policy.name: policy.config(config, None, None) for policy in policies}
        self.vocab_size = self._loaded.config.vocab_size
        self._cost_model: CostModel | None = None
        self._started: EngineStarted | None = None

    def measure_capacity(self, requests: Sequence[WorkloadRequest]) -> float:
        """The requests per second when all arrive at once; the simulation is fitted to this run."""
        log = EventList()
        engine = build_engine(next(iter(self._configs.values())), loaded=self._loaded, events=log)
        drive_all_at_once(engine, requests[: len(requests) // 4 + 1])
        run_forced(engine, log, requests)
        self._cost_model, self._started = fit_cost_model(log.events), engine.facts.started
        return summarize(log.events).requests_per_s

    def run(self, name: str, requests: Sequence[WorkloadRequest]) -> Values:
        """Serve the requests on the engine of a policy."""
        log, service = EventList(), WaitingServiceTally()
        engine = build_engine(self._configs[name], loaded=self._loaded, events=EventBroadcaster(log, service))
        run_forced(engine, log, requests)
        return _values(summarize(log.events), service, engine.facts.started, requests)

    def simulate(self, name: str, requests: Sequence[WorkloadRequest]) -> Values:
        """Serve the requests on the simulated engine of a policy."""
        assert self._cost_model is not None
        assert self._started is not None
        tally, service = RunTally(), WaitingServiceTally()
        config = sim_config_from_recording(self._configs[name], self._started)
        simulate(requests, config, self._cost_model, EventBroadcaster(tally, service))
        return _values(tally.result(), service, config.engine_started(), requests)


def _values(
    run: RunMetrics, service: WaitingServiceTally, engine: EngineStarted, requests: Sequence[WorkloadRequest]
) -> Values:
    num_slots = engine.num_blocks * engine.block_size
    values = run.values() | {
        "service_gap": service.largest_waiting_gap,
        "service_bound": service_bound(engine.scheduling_policy, requests, num_slots, engine.max_num_seqs),
    }
    return {name: value for name, value in values.items() if value is not None}


def compare(args: argparse.Namespace, comparison: Comparison, lengths: Lengths, capacity: float) -> list[Measured]:
    """Run all loads, seeds and policies."""
    found: dict[tuple[str, float, str], list[Values]] = {}
    policies = [policy.name for policy in args.policies]
    for load in args.loads:
        for number, seed in enumerate(args.seeds):
            requests = draw_requests(lengths, args.num_prompts, seed, comparison.vocab_size, args.goodput)
            requests = at_rate(requests, load * capacity, seed)
            first = number % len(policies)
            for policy in policies[first:] + policies[:first]:
                runs = {"simulation": comparison.simulate(policy, requests)}
                if not args.simulation_only:
                    runs["engine"] = comparison.run(policy, requests)
                for source, values in runs.items():
                    found.setdefault((source, load, policy), []).append(values)
                    print(f"load {load:g}, seed {seed}, {policy}, {source}: {describe_run(values)}", file=sys.stderr)
    return [Measured(*key, over_seeds(runs)) for key, runs in sorted(found.items(), key=lambda each: each[0][:2])]


def describe_run(values: Values) -> str:
    """The mean latency of a run, and its service gap with the bound of its policy."""
    bound = f" of at most {values['service_bound']:,.0f}" if "service_bound" in values else ""
    return f"mean latency {values['e2e_latency_mean']:.2f} s, service gap {values['service_gap']:,.0f}{bound}"


def over_seeds(runs: Sequence[Values]) -> Values:
    """The means of the values, and those of SERVICE of the run whose gap is the largest share of its bound."""
    worst = max(runs, key=lambda values: values["service_gap"] / values.get("service_bound", 1.0))
    names = set.intersection(*(set(values) for values in runs))
    return {name: worst[name] if name in SERVICE else fmean(values[name] for values in runs) for name in sorted(names)}


def exceeds_bound(row: Measured) -> bool:
    return row.values["service_gap"] > row.values.get("service_bound", math.inf)


# -- report --------------------------------------------------------------------------------------------------------


def with_ratios(rows: Sequence[Measured], baseline: str) -> list[Measured]:
    """Add the ratio of each mean latency to that of the first policy."""
    base = {(row.source, row.load): row.values["e2e_latency_mean"] for row in rows if row.policy == baseline}
    return [
        replace(row, values=row.values | {"ratio": row.values["e2e_latency_mean"] / base[row.source, row.load]})
        for row in rows
    ]


def make_table(source: str, rows: Sequence[Measured]) -> Table:
    """The table of the engine or of the simulation."""
    names = {"ratio": "mean, ratio", **SHOWN}
    table = Table("load", "policy", *names.values(), title=source)
    for row in rows:
        if row.source == source:
            cells = (format_cell(row.values.get(name)) for name in names)
            table.add_row(f"{row.load:g}", row.policy, *cells)
    return table


def format_cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _numbers(kind: type[int] | type[float]) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model as in chairlift serve")
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--trace", type=Path, help="trace with lengths, such as Azure's CSV")
    parser.add_argument("--policies", type=parse_policies, default=POLICIES, help=f"default: {POLICIES}")
    parser.add_argument("--loads", type=_numbers(float), default="0.7,0.9,1.1")
    parser.add_argument("--seeds", type=_numbers(int), default="0,1,2")
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--goodput", type=partial(parse_slo, name="goodput"), default="ttft:2000 tpot:100")
    parser.add_argument("--simulation-only", action="store_true", help="run the engine only to fit the simulation")
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the tables")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        load_format=args.load_format,
        max_num_seqs=args.max_num_seqs,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=max(DEFAULT_MAX_NUM_BATCHED_TOKENS, args.max_num_seqs),
        num_threads=args.num_threads,
        skip_tokenizer_init=True,
    )
    comparison = Comparison(config, args.policies)
    lengths = read_lengths(args.trace, args.max_model_len)
    capacity = comparison.measure_capacity(
        draw_requests(lengths, args.num_prompts, CAPACITY_SEED, comparison.vocab_size, args.goodput)
    )
    rows = with_ratios(compare(args, comparison, lengths, capacity), args.policies[0].name)
    records = [{"source": row.source, "load": row.load, "policy": row.policy, **row.values} for row in rows]
    result = {"capacity_requests_per_s": capacity, "rows": records}
    capacity_line = f"capacity: {capacity:.2f} requests/s at {args.max_num_seqs} seats"
    tables = [make_table(source, rows) for source in dict.fromkeys(row.source for row in rows)]
    chosen = {"policies": ",".join(policy.name for policy in args.policies), "goodput": asdict(args.goodput)}
    options = {**vars(args), **chosen, "trace": args.trace and args.trace.name}
    print_result("queue_order", options, result, [capacity_line, *tables], as_json=args.json, width=200)
    return 1 if any(map(exceeds_bound, rows)) else 0


if __name__ == "__main__":
    sys.exit(main())
