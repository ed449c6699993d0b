"""`chairlift bench latency`: latency of one batch of requests that all arrive at the start, without HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from chairlift.config import EngineConfig
from chairlift.engine.progress import progress_bar
from chairlift.engine.startup.factory import Engine, build_engine
from chairlift.errors import ConfigError
from chairlift.events import EngineStarted, Event, EventList, RequestArrived, RequestWaiting, Step
from chairlift.lab.bench.distribution import Distribution
from chairlift.lab.bench.driver import drive, forced_requests
from chairlift.lab.bench.machine import MachineFacts, machine_facts, peak_rss_bytes
from chairlift.lab.bench.throughput import engine_caption
from chairlift.lab.bench.workload_options import check_minimums
from chairlift.lab.tables import make_table, number, print_report
from chairlift.lab.workload.arrivals import ArrivalProcess
from chairlift.lab.workload.lengths import FixedLength
from chairlift.lab.workload.request import WorkloadRequest
from chairlift.lab.workload.synthetic import make_workload
from chairlift.request import WaitReason

CAPACITY_WAIT_REASONS = {
    WaitReason.SEATS.value: "max_num_seqs seats",
    WaitReason.MEMORY.value: "the KV pool",
    WaitReason.PREEMPTION.value: "the KV pool",
    WaitReason.BATCH.value: "a static batch (static_batch_size, or the pool)",
}
"""By wait reason, the limit that keeps the requests from being one batch. A wait for the token budget is not listed: a
long prefill takes several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """The size of the batch and the number of iterations. `chairlift bench latency --help` describes each field.

    The requests are greedy. Their prompts are random, and differ between iterations.

    Raises:
        ConfigError: a value is out of range. The message names the option, the value and the limit.
    """

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    num_iters: int = 10
    num_iters_warmup: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        check_minimums(self, input_len=1, output_len=1, batch_size=1, num_iters=1, num_iters_warmup=0, seed=0)

    def workload(self, vocab_size: int, token_round: int) -> list[WorkloadRequest]:
        """Create the requests of one iteration."""
        prompt, output = FixedLength(self.input_len), FixedLength(self.output_len)
        return make_workload(
            self.seed, self.batch_size, prompt, output, ArrivalProcess(), vocab_size, token_round=token_round
        )


@dataclass(frozen=True, slots=True)
class Iteration:
    """The times of one batch, in seconds.

        arrival -- step -- step --+-- step -- step -- ... -- last step
           |-- prefill -----------|                               |
           |-- latency -------------------------------------------|
                                  |-- steps of decode_per_token --|

    Attributes:
        latency: from the arrival to the last step.
        prefill: until every request has its first token. If the prompts take several steps, requests whose prompts are
            computed early decode during this time.
        decode_per_token: mean time of the steps after that; None if there are none.
    """

    latency: float
    prefill: float
    decode_per_token: float | None


@dataclass(frozen=True, slots=True)
class LatencyResult:
    """The times of the iterations, with the machine, the engine and the batch that they belong to."""

    machine: MachineFacts
    engine: EngineStarted
    options: LatencyOptions
    iterations: list[Iteration]
    peak_rss_bytes: int | None

    def distribution(self, phase: str) -> Distribution | None:
        """The distribution of a field of `Iteration` over the iterations; None if no iteration has a value."""
        values = [getattr(iteration, phase) for iteration in self.iterations]
        return Distribution.from_values([value for value in values if value is not None])

    def to_dict(self) -> dict[str, Any]:
        """The result for JSON, in seconds."""
        found = {phase: self.distribution(phase) for phase in ("latency", "prefill", "decode_per_token")}
        return {
            "benchmark": "latency",
            "machine": self.machine.to_dict(),
            "engine": asdict(self.engine),
            "workload": asdict(self.options),
            "results": {phase: values and values.to_dict() for phase, values in found.items()},
            "peak_rss_bytes": self.peak_rss_bytes,
            "iterations": [asdict(iteration) for iteration in self.iterations],
        }


def run_latency(config: EngineConfig, options: LatencyOptions) -> LatencyResult:
    """Build the engine, warm it up, and run the batch `options.num_iters` times.

    Raises:
        ConfigError: an option cannot be honoured, or the requests do not fit the engine as one batch.
        ModelLoadError: the model cannot be loaded.
    """
    log = EventList()
    engine = build_engine(replace(config, skip_tokenizer_init=True), events=log)
    try:
        iterations = _iterations(engine, log, options)
    finally:
        engine.close()
    return LatencyResult(machine_facts(), engine.facts.started, options, iterations, peak_rss_bytes())


def _iterations(engine: Engine, log: EventList, options: LatencyOptions) -> list[Iteration]:
    total = options.num_iters_warmup + options.num_iters
    iterations: list[Iteration] = []
    vocab_size = engine.facts.model_config.vocab_size
    forced_requests(engine, options.workload(vocab_size, 0))
    with progress_bar("iterations", total) as advance:
        for token_round in range(total):
            del log.events[1:]
            drive(engine, options.workload(vocab_size, token_round))
            _check_one_batch(log.events, options)
            iterations.append(measure_iteration(log.events))
            advance()
    return iterations[options.num_iters_warmup :]


def measure_iteration(events: Sequence[Event]) -> Iteration:
    """Compute the times of a batch from the events of its iteration."""
    steps = [event for event in events if isinstance(event, Step)]
    start = min(event.time for event in events if isinstance(event, RequestArrived))
    first_token: dict[str, float] = {}
    for step in steps:
        for request_id, num_new in zip(step.request_ids, step.num_new, strict=True):
            if num_new:
                first_token.setdefault(request_id, step.time)
    prefilled, end = max(first_token.values()), steps[-1].time
    num_decoded: Counter[str] = Counter()
    for step in steps:
        if step.time > prefilled:
            num_decoded.update(dict(zip(step.request_ids, step.num_new, strict=True)))
    num_tokens = max(num_decoded.values(), default=0)
    return Iteration(
        latency=end - start,
        prefill=prefilled - start,
        decode_per_token=(end - prefilled) / num_tokens if num_tokens else None,
    )


def _check_one_batch(events: Sequence[Event], options: LatencyOptions) -> None:
    batch = f"batch_size={options.batch_size} requests of {options.input_len} + {options.output_len} tokens"
    for event in events:
        if isinstance(event, RequestWaiting) and event.reason in CAPACITY_WAIT_REASONS:
            raise ConfigError(
                f"{batch} do not fit {CAPACITY_WAIT_REASONS[event.reason]} at once: {event.num_running} run, and the "
                f"next one needs {event.needed_blocks} blocks of {event.free_blocks} free ones. Reduce batch_size, or "
                f"raise that limit."
            )
    if any(isinstance(event, Step) and event.preempted for event in events):
        raise ConfigError(f"{batch} outgrow the KV pool: reduce batch_size, or enlarge the pool.")


def print_latency(result: LatencyResult, file: TextIO | None = None, as_json: bool = False) -> None:
    """Write a table with the distribution of each phase over the iterations, or the JSON line, to `file`."""
    options, columns = result.options, ["mean", "median", "p90", "p99", "min", "max"]
    title = (
        f"{result.engine.model}: one batch of {options.batch_size} requests, "
        f"{options.input_len} prompt and {options.output_len} output tokens each"
    )
    caption = (
        f"{engine_caption(result.machine, result.engine, result.peak_rss_bytes)}\n{len(result.iterations)} iterations "
        f"after {options.num_iters_warmup} to warm up; decode: mean time of each token after the prefill"
    )
    table = make_table(title, ["", *columns], caption)
    for label, phase, scale in (
        ("latency, s", "latency", 1.0),
        ("prefill, ms", "prefill", 1e3),
        ("decode, ms/token", "decode_per_token", 1e3),
    ):
        if (distribution := result.distribution(phase)) is not None:
            values = distribution.to_dict()
            table.add_row(label, *(number(values[column] * scale) for column in columns))
    print_report([table], result.to_dict(), file, as_json)
