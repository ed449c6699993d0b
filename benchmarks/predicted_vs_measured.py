"""Measures how well a fitted cost model predicts runs that it was not fitted to.

    python benchmarks/predicted_vs_measured.py [--rounds 3] [--num-prompts 48] [--model MODEL]

In each round the engine runs one workload, and a cost model is fitted to its step events. Then the engine runs
workloads with other seeds, lengths and arrivals. They are simulated with the fitted model, and throughput and latency
are compared. Every round has a fit of its own, because the speed of a machine changes. The script prints a table and
one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from chairlift.config import EngineConfig
from chairlift.core.factory import KVPool
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.events import Event, EventList
from chairlift.lab.bench.driver import drive
from chairlift.lab.bench.machine import machine_facts
from chairlift.lab.metrics.run import RunMetrics, Summary, summarize
from chairlift.lab.sim.fitted_cost_model import FitError, FittedCostModel, fit_cost_model, fit_error, step_seconds
from chairlift.lab.sim.simulator import SimConfig, simulate
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import parse_lengths
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload


@dataclass(frozen=True)
class WorkloadSpec:
    """The lengths and arrivals of a workload. `rate` is in requests per second; None is a burst."""

    name: str
    prompt: str
    output: str
    rate: float | None = None

    def requests(self, seed: int, count: int, vocab_size: int) -> list[WorkloadRequest]:
        prompt, output = parse_lengths(self.prompt), parse_lengths(self.output)
        return make_workload(seed, count, prompt, output, ArrivalProcess(self.rate), vocab_size, token_round=seed)


FITTED_ON = WorkloadSpec("fit: a burst, then a trickle", "lognormal:96,0.7,16..512", "exp:64,8..256")
HELD_OUT = (
    WorkloadSpec("burst, longer outputs", "lognormal:64,0.5,16..256", "exp:96,8..384"),
    WorkloadSpec("burst, longer prompts", "uniform:128..384", "fixed:48"),
    WorkloadSpec("Poisson, 2 requests/s", "lognormal:96,0.7,16..512", "exp:64,8..256", rate=2.0),
)


def e2e_percentile(percent: int) -> Callable[[RunMetrics], float]:
    def value(run: RunMetrics) -> float:
        summary = run.e2e_latency
        assert isinstance(summary, Summary)
        return float(getattr(summary, f"p{percent}"))

    return value


FIGURES: dict[str, Callable[[RunMetrics], float]] = {
    "output tokens/s": lambda run: run.output_tokens_per_s,
    "E2E latency p50 s": e2e_percentile(50),
    "E2E latency p99 s": e2e_percentile(99),
}


def measure(engine: Engine, log: EventList, workload: Sequence[WorkloadRequest]) -> RunMetrics:
    del log.events[1:]
    drive(engine, workload)
    return summarize(log.events)


def predict(engine: Engine, model: FittedCostModel, workload: Sequence[WorkloadRequest]) -> RunMetrics:
    limits, plan = engine.facts.scheduler_config, engine.facts.kv_cache_plan
    config = SimConfig(limits, KVPool(plan.num_blocks, plan.block_size, limits.max_model_len))
    events = EventList()
    simulate(workload, config, model, events)
    return summarize(events.events)


def fit(engine: Engine, log: EventList, seed: int, count: int) -> FittedCostModel:
    """Fit a cost model to a burst, in which batches are large, and to slow arrivals, in which they are small."""
    vocab_size = engine.facts.model_config.vocab_size
    measure(engine, log, FITTED_ON.requests(seed, count, vocab_size))
    steps = list(log.events)
    trickle = WorkloadSpec("trickle", FITTED_ON.prompt, "fixed:24", rate=1.5)
    measure(engine, log, trickle.requests(seed + 1, count // 3, vocab_size))
    return fit_cost_model([*steps, *log.events[1:]], "a burst and a trickle on this machine")


def prediction_error(model: FittedCostModel, events: Iterable[Event]) -> FitError:
    """The error of the model on a run, which should not be the one that it was fitted to."""
    timed = step_seconds(events)
    predicted = np.array([model.seconds(shape) for shape, _ in timed])
    return fit_error(predicted, np.array([duration for _, duration in timed]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--model", default=None)
    options = parser.parse_args()
    log = EventList()
    config = EngineConfig(model=options.model, skip_tokenizer_init=True, max_num_seqs=32, enable_prefix_caching=False)
    engine = build_engine(config, events=log)
    machine = machine_facts()
    print(
        f"{machine.cpu}, {machine.num_threads} threads; {engine.facts.model_name}; {options.num_prompts} requests a run"
    )
    errors: dict[str, dict[str, list[float]]] = {load.name: {name: [] for name in FIGURES} for load in HELD_OUT}
    step_errors: list[float] = []
    for number in range(options.rounds):
        model = fit(engine, log, 10 * number, options.num_prompts)
        for index, load in enumerate(HELD_OUT):
            workload = load.requests(
                1000 + 10 * number + index, options.num_prompts, engine.facts.model_config.vocab_size
            )
            run, simulated = measure(engine, log, workload), predict(engine, model, workload)
            step_errors.append(prediction_error(model, log.events).median)
            for name, value in FIGURES.items():
                error = value(simulated) / value(run) - 1
                errors[load.name][name].append(error)
                pair = f"measured {value(run):8.2f} predicted {value(simulated):8.2f}"
                print(f"  {load.name:24} {name:18} {pair}  {error:+.1%}")
    rows = [
        {
            "held_out": load,
            "figure": name,
            "median_error": median(map(abs, values)),
            "worst_error": max(values, key=abs),
        }
        for load, figures in errors.items()
        for name, values in figures.items()
    ]
    print(f"\n{'held-out run':24} {'figure':18} median error  worst")
    for row in rows:
        print(f"{row['held_out']:24} {row['figure']:18} {row['median_error']:11.1%}  {row['worst_error']:+.1%}")
    print(f"single steps of held-out runs: median error {median(step_errors):.1%}")
    result = {
        "benchmark": "predicted_vs_measured",
        "machine": asdict(machine),
        "rounds": options.rounds,
        "rows": rows,
    }
    print(json.dumps({**result, "median_step_error": median(step_errors)}))


if __name__ == "__main__":
    main()
